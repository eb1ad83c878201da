"""A random rank dies or freezes, again and again in one run: no bit changes. And the control, a stock loop."""

import re
import time
from pathlib import Path

import pytest

from tests.support import needs, small_runs
from tests.support.chaos import chaos, faults_in, launcher, reported, still_running
from tests.support.processes import read, records, run
from tests.support.small_runs import SAMPLES, SUPPORT, starts, trained, weights_of

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("faults", "epochs", "seed"), [(4, 3, 20), needs.long(12, 6, 179)], ids=["4", "12"])
def test_ranks_that_die_or_freeze_change_no_bit(tmp_path: Path, faults: int, epochs: int, seed: int) -> None:
    def job(run_dir: Path, *more: object) -> list[str]:
        rare = ["--checkpoint-every", 0, "--eval-every", 9 * epochs]
        return small_runs.job(run_dir, "--epochs", epochs, *rare, *more)

    trained(2, job(tmp_path / "undisturbed"))
    run_dir, begun = tmp_path / "run", time.monotonic()
    # the next one as soon as it stands again
    mix = f"--kill-every 1s --seed {seed} --count {faults} --minutes 14 --faults kill,keeper,term,stop"
    done = run(chaos(mix, *launcher("--", *job(run_dir, "--pause", 0.3, "--hang-timeout", 5))), limit=900)
    wall = time.monotonic() - begun

    assert len(faults_in(done.stdout)) == faults
    assert {kind for kind, _ in faults_in(done.stdout)} == {"kill", "keeper", "term", "stop"}
    assert {whom[: len("rank 0")] for _, whom in faults_in(done.stdout)} == {"rank 0", "rank 1"}
    assert len(starts(run_dir)) == faults + 1, "each of them had to start the ranks again"
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    assert read(run_dir)["samples_seen"] == epochs * SAMPLES
    assert small_runs.no_step_is_done_twice(run_dir)
    assert reported(done.stdout, "lost, done again") == "0"
    assert re.match(rf"{faults}: .*\bstop [1-9]", reported(done.stdout, "faults"))
    assert float(reported(done.stdout, "fault to step").split()[-2]) > 5, "the longest, of a frozen rank"
    assert "no progress for 5 s" in done.stderr
    assert wall - 60 < sum(read(run_dir)["ledger"].values()) < wall, "every second has an account"
    assert still_running(run_dir) == []


@pytest.mark.parametrize(("keeper", "kills"), [needs.long(*it) for it in (("on", 20), ("off", 2))])
def test_kills_need_no_restart_by_torchrun(keeper: str, kills: int, tmp_path: Path, run_dir: Path) -> None:
    """And the control: without keepers each of them ends a job that torchrun must not start again."""
    epochs = 4 + kills  # of 9 steps: a second or more
    trained(2, small_runs.job(tmp_path / "undisturbed", "--epochs", epochs))
    job = small_runs.job(run_dir, "--epochs", epochs, "--pause", 0.1, "--checkpoint-every", 0, "--keeper", keeper)
    mix = f"--kill-every 1s --seed 1 --count {kills} --faults kill"
    done = run(chaos(mix, *launcher("--max-restarts", 0, "--", *job)), limit=500)
    by_chaos = 1 if keeper == "on" else kills + 1
    assert reported(done.stdout, "starts") == f"{by_chaos} of the command, {kills + 1} of its ranks"
    assert read(run_dir)["restarts"] == kills
    assert read(run_dir)["restarts_in_place"] == (kills if keeper == "on" else 0)
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    assert reported(done.stdout, "lost, done again") == "0"


def test_the_control_a_stock_loop_does_its_steps_again(tmp_path: Path) -> None:
    run_dir, epochs, batch = tmp_path / "run", 2, 72  # 20 steps an epoch
    job = launcher("--script", SUPPORT / "stock_loop.py", "--", "--run-dir", run_dir, epochs, batch, 0.2)
    done = run(chaos("--kill-every 2s --seed 1 --count 1 --faults kill", *job), limit=500)
    lost = int(reported(done.stdout, "lost, done again"))
    assert lost >= 1, "the samples of these steps were trained on twice"
    assert len(records(run_dir, "train")) == 40 + lost

"""Ranks that are killed and jobs that are stopped: the last finished step is saved and no process is left."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.processes import (
    TRAIN,
    finish_all,
    fork_ranks,
    read,
    records,
    start,
    torchrun,
    wait_until,
    wait_until_gone,
)
from tests.support.small_runs import (
    BOTH_WAYS,
    PLAN,
    SAMPLES,
    job,
    pids_of,
    restarts_of,
    saved_step,
    told_step,
    wait_for_step,
    workers_of,
)


@BOTH_WAYS
def test_any_rank_is_killed_under_a_plain_torchrun_and_no_step_is_lost_and_no_bit_changes(
    tmp_path: Path, dies: str
) -> None:
    """Both in turn, at random steps, without a single planned checkpoint."""
    rare = ["--checkpoint-every", 0, "--eval-every", 1000]
    finish_all(fork_ranks(2, TRAIN, *job(tmp_path / "undisturbed", *rare)))
    run_dir, dice = tmp_path / "run", random.Random()
    process = start(torchrun(2, TRAIN, *job(run_dir, *rare, "--pause", 0.15), restarts=3))
    for starts, victim in ((2, 0), (3, 1), (4, 0)):
        wait_for_step(run_dir, told_step(run_dir) + dice.randrange(2, 6), process)
        os.kill(pids_of(process, dies)[victim], signal.SIGKILL)
        wait_until(lambda starts=starts: len(records(run_dir, "start")) >= starts, "the next start")
    finished = processes.finish(process)
    assert finished.returncode == 0, finished.stderr[-4000:]
    steps = [record["step"] for record in records(run_dir, "train")]
    # rank 0 may be killed between a commit and the line that tells of it, which another rank then has done
    assert sorted(set(steps)) == sorted(steps), "no step is done twice"
    starts = [record["step"] for record in records(run_dir, "start")]
    assert all(step > 0 for step in starts[1:])
    assert restarts_of(run_dir) == ((0, 3) if dies == "trainer" else (3, 0))
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    assert read(run_dir)["weights_sha256"] == read(tmp_path / "undisturbed")["weights_sha256"]


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_saves_the_last_step_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals, ranks: int
) -> None:
    run_dir = tmp_path / "run"
    options = job(run_dir, "--checkpoint-every", 0, "--pause", 0.2, "--num-workers", 1)
    process = start([sys.executable, "launch/single_node.py", "-g", str(ranks), "--", *options])
    wait_for_step(run_dir, 3, process)
    pids = [*workers_of(process).values()]
    assert len(pids) == ranks
    process.send_signal(number)
    processes.finish(process)
    wait_until_gone(pids)
    status = read(run_dir, "status.json")
    assert status["state"] == "stopped"
    assert status["reason"] == number.name
    told = records(run_dir, "train")[-1]["step"]
    assert saved_step(run_dir) >= told, "no finished step is lost"


@pytest.mark.slow
def test_workers_whose_agent_is_killed_save_and_end(tmp_path: Path) -> None:
    """`kill -9` of torchrun itself, which would leave its workers running for ever."""
    run_dir = tmp_path / "run"
    process = start(torchrun(2, TRAIN, *job(run_dir, "--checkpoint-every", 0, "--pause", 0.2)))
    wait_for_step(run_dir, 3, process)
    workers = [*workers_of(process).values()]
    process.kill()
    wait_until_gone(workers)
    process.communicate()
    told = records(run_dir, "train")[-1]["step"]
    assert saved_step(run_dir) >= told


def test_the_control_a_stock_loop_loses_its_steps(tmp_path: Path) -> None:
    """The same SIGTERM to a loop that saves now and then, as the usual templates do: nothing is left."""
    script = tmp_path / "stock.py"
    script.write_text(
        "import sys, time, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "for step in range(1, 1000):\n"
        "    time.sleep(0.05)\n"
        "    print(step, flush=True)\n"
        "    if step % 100 == 0:\n"
        "        torch.save(model.state_dict(), sys.argv[1])\n"
    )
    process = start([sys.executable, str(script), str(tmp_path / "saved.pt")])
    assert process.stdout
    while int(process.stdout.readline()) < 5:
        pass
    process.send_signal(signal.SIGTERM)
    processes.finish(process)
    assert not (tmp_path / "saved.pt").exists()

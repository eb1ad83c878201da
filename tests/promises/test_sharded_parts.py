"""--shard on with what is not divided: on 2 and 3 ranks and through kills as in an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from evenkeel.run.checkpoint import load
from tests.promises.test_sharded_state import SHARD, STEPS, slowed  # noqa: F401  (a fixture)
from tests.support import needs
from tests.support.processes import ROOT, TRAIN, fork_ranks, records, start, torchrun
from tests.support.small_runs import options, signal_ranks_at, starts, told_step, trained, weights_of

pytestmark = needs.sharding

STRUCK = ROOT / "tests" / "support" / "struck_task.py"
EVALUATED = [*SHARD, "--eval-every", 2, "--checkpoint-every", 0, "--log-every", 1]


def rates(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["train/lr"] for record in records(run_dir, "train")}


@pytest.mark.slow
def test_schedulers_go_on_through_kills_and_on_other_ranks(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(folder: Path) -> list[str]:
        return options(f"{STRUCK}:Scheduled", folder, *EVALUATED)

    trained(1, job(tmp_path / "undisturbed"))
    expected = rates(tmp_path / "undisturbed")
    assert len(set(expected.values())) == len(expected) == STEPS
    assert expected[STEPS] < 1e-4, "evaluations have halved it"
    monkeypatch.setenv("STRIKES", "loss:1:2 optimizer:2:4 copy:0:6")
    job_on_three = start(torchrun(3, TRAIN, *job(run_dir)))
    signal_ranks_at(8, run_dir, [job_on_three], signal.SIGTERM)
    stopped = told_step(run_dir)
    signal_ranks_at(stopped + 1, run_dir, fork_ranks(2, TRAIN, *job(run_dir)), signal.SIGTERM)
    trained(1, job(run_dir))
    assert starts(run_dir) == sorted(starts(run_dir))
    assert len(starts(run_dir)) >= 5, "three kills and two stops"
    assert rates(run_dir) == expected
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    both = (run_dir, tmp_path / "undisturbed")
    last = [load(folder / "checkpoints" / f"step-{STEPS:08d}")["schedulers"] for folder in both]
    assert last[0] == last[1]

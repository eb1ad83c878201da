"""A step whose loss or gradient is not finite: left out or the end, alike on all ranks, and never in the weights."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import read, records
from tests.support.small_runs import PLAN, failed, job, model_of, trained

BAD = 7
"""The step that is not finite, counted from 1."""


def test_a_loss_of_nan_on_one_rank_stops_all_at_the_step_before_or_is_left_out_on_all(run_dir: Path) -> None:
    """Its gradient is finite, and only rank 0 sees it; still every rank ends by itself, at the same step."""
    # two micro-batches of a full step on each of the 2 ranks, one on rank 0 in the last
    options = job(run_dir, "--checkpoint-every", 0, "--nan-at", 2 * BAD)
    said = "".join(done.stderr for done in failed(2, options))
    assert f"evenkeel: the loss or the gradient of step {BAD} is not finite" in said
    status = read(run_dir, "status.json")
    assert (status["state"], status["step"]) == ("failed", BAD - 1)
    assert "not finite" in status["reason"]
    assert (run_dir / "checkpoints" / f"step-{BAD - 1:08d}").is_dir()
    for rank in (0, 1):
        log = (run_dir / "logs" / "attempt-0001" / f"rank-{rank}.log").read_text()
        assert f"failed at step {BAD - 1}: the loss or the gradient" in log

    # the same run goes on, and leaves out the step that is not finite now: the calls are counted from there
    trained(2, [*options, "--on-nonfinite", "skip"])
    skipped = [(record["step"], record["skipped"]) for record in records(run_dir, "nonfinite")]
    assert skipped == [(2 * BAD, 1)], "the last step of an epoch has one call"
    assert read(run_dir)["step"] == PLAN.total_steps
    assert all(tensor.isfinite().all() for tensor in model_of(run_dir).values())

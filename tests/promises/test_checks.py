"""Tasks with mistakes and steps that are not finite end in a line on all ranks, and nothing of them is committed."""

import re
from pathlib import Path

import pytest
import torch

from tests.support import needs
from tests.support.components import has
from tests.support.processes import TRAIN, read, records, run, torchrun
from tests.support.small_runs import PLAN, failed, job, model_of, odd_job, the_line, trained, weights_of


@needs.no_gpu
def test_ranks_say_which_parameters_get_no_gradient_and_none_waits_for_ever(tmp_path: Path) -> None:
    """Three ranks, of which the last has no micro-batch and would wait in DDP for the gradients of the others."""
    first, *others = failed(3, odd_job("OneUnused", tmp_path / "run"))  # no torchrun is here to end them
    assert "spare.weight, spare.bias" in first.stderr.splitlines()[-1]
    assert first.stderr.count("spare.weight") == 1
    assert ["spare.weight" in process.stderr for process in others] == [True, False]


@needs.no_gpu
@pytest.mark.parametrize("reduce", ["ring", "tree"])
def test_a_part_that_one_rank_leaves_out_in_a_later_step_commits_nothing(tmp_path: Path, reduce: str) -> None:
    """There DDP returns from an unfinished reduction in silence, with an old gradient of an earlier micro-batch."""
    options = ["--micro-batch", 1, "--reduce", reduce, "--checkpoint-every", 1]
    _, second = failed(2, odd_job("LeftOutLater", tmp_path / "run", *options))
    assert "parameters got no gradient" in the_line(second.stderr)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000001"]


@needs.no_gpu
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_collective_in_a_loss_is_refused_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    for done in failed(ranks, odd_job("Gathers", tmp_path / "run")):
        line = the_line(done.stderr)
        assert line.startswith(f"loss() calls {'all_gather' if ranks else 'get_world_size'} of torch.distributed at ")
        assert "set collectives = True in the task's class" in line


@pytest.mark.slow
@needs.no_gpu
def test_the_control_with_a_collective_the_result_depends_on_the_ranks(tmp_path: Path) -> None:
    losses = set()
    for ranks in (1, 2):
        # three steps, because in the last of the epoch a rank has no micro-batch and the others would wait for it
        job = odd_job("GathersAndSaysSo", tmp_path / str(ranks), "--max-steps", 3, "--reduce", "tree", "--log-every", 1)
        trained(ranks, job)
        losses.add(records(tmp_path / str(ranks), "train")[-1]["train/loss"])
    assert len(losses) == 2


@needs.no_gpu
def test_a_network_that_the_loss_uses_from_some_step_on(tmp_path: Path) -> None:
    _, second = failed(2, odd_job("UsedLater", tmp_path / "undeclared"))
    assert "spare.weight, spare.bias" in second.stderr
    for ranks, steps in ((0, 2), (0, 4), (2, 4)):
        run_dir = tmp_path / f"{ranks}-{steps}"
        job = odd_job("UsedLaterAndSaidSo", run_dir, "--reduce", "tree", "--max-steps", steps, "--schedule", "constant")
        trained(ranks, job)
    early, late, other = (model_of(tmp_path / name) for name in ("0-2", "0-4", "2-4"))
    assert torch.equal(early["spare.weight"], early["unused.weight"]), "not even its weight decay"
    assert not torch.equal(late["spare.weight"], late["unused.weight"])
    assert weights_of(tmp_path / "0-4") == weights_of(tmp_path / "2-4")
    assert other.keys() == late.keys()


BAD = 7
"""The step that is not finite, counted from 1."""


def test_a_loss_of_nan_on_one_rank_stops_all_at_the_step_before_or_is_left_out_on_all(run_dir: Path) -> None:
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
    done, _ = trained(2, [*options, "--on-nonfinite", "skip"])
    if has("replay"):
        look = f"python -m evenkeel replay {run_dir} --step {2 * BAD}"
        assert f"left out, 1 in this attempt; to see where it begins: {look}" in done.stderr
    skipped = [(record["step"], record["skipped"]) for record in records(run_dir, "nonfinite")]
    assert skipped == [(2 * BAD, 1)], "the last step of an epoch has one call"
    assert read(run_dir)["step"] == PLAN.total_steps
    assert all(tensor.isfinite().all() for tensor in model_of(run_dir).values())


@pytest.mark.slow
def test_a_sample_that_is_not_finite_ends_the_job_in_the_second_attempt(run_dir: Path) -> None:
    """Ranks compare their errors, so that of rank 0 must not have what only that one knows."""
    run(torchrun(2, TRAIN, *odd_job("NotANumber", run_dir), restarts=3), expect=None)
    assert len(records(run_dir, "start")) == 2


@needs.no_gpu
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("Mislabelled", r"^evenkeel: rank 0 failed: IndexError: Target 5 is out of bounds .*\(sample 9\)"),
        ("NotANumber", r"^evenkeel: sample 9 of step \d has values that are not finite$"),
        ("Masked", r"\A(?![\s\S]*has values that are not finite)[\s\S]*is not finite: a bad sample "),
        ("FailsLater", r"^evenkeel: rank 0 failed: KeyError: 'a part' \(one of the samples \d+, \d+\) at "),
    ],
)
def test_the_samples_of_a_step_that_fails_are_named(tmp_path: Path, task: str, said: str) -> None:
    (done,) = failed(0, odd_job(task, tmp_path / "run"))
    found = re.search(said, done.stdout + done.stderr, re.MULTILINE)
    assert found
    named = re.search(r"sample 9|samples \d+, \d+", found[0])
    assert bool(named) == (task != "Masked")
    assert not named or named[0] in read(tmp_path / "run", "status.json")["reason"]

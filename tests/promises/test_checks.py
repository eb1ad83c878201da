"""Tasks with mistakes end in a line on all ranks, and nothing of them is committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import needs
from tests.support.processes import records
from tests.support.small_runs import failed, model_of, odd_job, the_line, trained, weights_of


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
    """It stays as it is before, and learns from then on, the same on any ranks; unless that is declared, it ends."""
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

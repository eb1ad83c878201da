"""Tasks with mistakes end in a line on all ranks, and nothing of them is committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.processes import TRAIN, finish, fork_ranks, kill_group, records
from tests.support.small_runs import odd_job, the_line, trained

alone = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it")


@alone
def test_ranks_say_which_parameters_get_no_gradient_and_none_waits_for_ever(tmp_path: Path) -> None:
    """Three ranks, of which the last has no micro-batch and would wait in DDP for the gradients of the others."""
    ranks = fork_ranks(3, TRAIN, *odd_job("OneUnused", tmp_path / "run"))
    try:
        ended = finish(ranks[0])
        assert ended.returncode == 1
        assert "spare.weight, spare.bias" in ended.stderr.splitlines()[-1]
        assert ended.stderr.count("spare.weight") == 1
        others = [finish(process) for process in ranks[1:]]  # no torchrun is here to end them
    finally:
        for process in ranks:
            kill_group(process)
    assert [process.returncode for process in others] == [1, 1]
    assert ["spare.weight" in process.stderr for process in others] == [True, False]


@alone
@pytest.mark.parametrize("reduce", ["ring", "tree"])
def test_a_part_that_one_rank_leaves_out_in_a_later_step_commits_nothing(tmp_path: Path, reduce: str) -> None:
    """There DDP returns from an unfinished reduction in silence, with an old gradient of an earlier micro-batch."""
    options = ["--micro-batch", 1, "--reduce", reduce, "--checkpoint-every", 1]
    ranks = fork_ranks(2, TRAIN, *odd_job("LeftOutLater", tmp_path / "run", *options))
    try:
        ended = [finish(process) for process in reversed(ranks)]
    finally:
        for process in ranks:
            kill_group(process)
    assert [process.returncode for process in ended] == [1, 1]
    assert "parameters got no gradient" in the_line(ended[0].stderr)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000001"]


@alone
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_collective_in_a_loss_is_refused_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    ended = [finish(rank) for rank in fork_ranks(ranks, TRAIN, *odd_job("Gathers", tmp_path / "run"))]
    assert [done.returncode for done in ended] == [1] * max(1, ranks)
    for done in ended:
        line = the_line(done.stderr)
        assert line.startswith(f"loss() calls {'all_gather' if ranks else 'get_world_size'} of torch.distributed at ")
        assert "set collectives = True in the task's class" in line


@pytest.mark.slow
@alone
def test_the_control_with_a_collective_the_result_depends_on_the_ranks(tmp_path: Path) -> None:
    losses = set()
    for ranks in (1, 2):
        # three steps, because in the last of the epoch a rank has no micro-batch and the others would wait for it
        job = odd_job("GathersAndSaysSo", tmp_path / str(ranks), "--max-steps", 3, "--reduce", "tree", "--log-every", 1)
        trained(ranks, job)
        losses.add(records(tmp_path / str(ranks), "train")[-1]["train/loss"])
    assert len(losses) == 2

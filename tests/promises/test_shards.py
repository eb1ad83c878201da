"""Shards: each sample exactly once an epoch through a kill and other numbers of ranks; the order cannot change."""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from evenkeel.data.plan import Plan
from evenkeel.data.shard_index import write_index
from tests.support.processes import TRAIN, read, run_forked, start, torchrun
from tests.support.shards import tars
from tests.support.small_runs import SUPPORT, Records, each_once, ended, kill_at, options, refusal, starts

TASK = f"{SUPPORT / 'shards_task.py'}:Sharded"
LENGTHS = [23, 9, 17, 30, 5, 16]  # 100 samples in 6 shards, 28 blocks
PLAN = Plan(samples=100, global_batch=12, micro_batch=3, epochs=3)  # 9 steps an epoch, the last of 4 samples


def job(folder: Path, run_dir: Path, *more: object) -> list[str]:
    shape = ["--epochs", 3, "--batch-size", 12, "--micro-batch", 3, "--log-every", 1, "--checkpoint-every", 2]
    return options(TASK, run_dir, *shape, "--folder", folder, "--record", run_dir.parent / "record", *more)


def by_node(world_size: int, first_step: int, end: int) -> Counter[int]:
    """The control: whole shards are dealt to ranks, as WebDataset's `split_by_node` does, in one epoch.

    Each rank gives its part of every step. After a stop it skips what its part of the steps before would have been.
    """
    counts: Counter[int] = Counter()
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    for rank in range(world_size):
        shards = list(zip(starts, LENGTHS, strict=True))[rank::world_size]
        mine = [number for at, length in shards for number in range(at, at + length)]
        share = PLAN.global_batch // world_size
        counts.update(mine[first_step * share : end * share])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_killed_on_two_ranks_and_finished_on_others_each_sample_comes_exactly_once(tmp_path: Path, ranks: int) -> None:
    folder, run_dir, record = tars(tmp_path / "shards", LENGTHS), tmp_path / "run", Records(tmp_path / "record")
    write_index(folder)
    record.of_another_attempt()
    process = start(torchrun(2, TRAIN, *job(folder, run_dir, "--pause", 0.1)))
    kill_at(random.randrange(3, 8), run_dir, process)
    record.of_another_attempt()
    command = torchrun(ranks, TRAIN) if ranks > 1 else [sys.executable, str(TRAIN)]
    ended(start([*command, *job(folder, run_dir)]))
    first, second = starts(run_dir)
    assert (first, second > 0) == (0, True)
    assert record.handed_out(PLAN, run_dir, (2, ranks)) == each_once(3, 100)
    assert read(run_dir)["world_sizes"] == [2, ranks]

    assert by_node(2, 0, 4) + by_node(2, 4, 100) == Counter(range(100)), "which is right on as many ranks"
    control = by_node(2, 0, second) + by_node(ranks, second, 100)
    assert control != Counter(range(100)), "whole shards, dealt to ranks: some come twice or never"


def test_a_run_keeps_its_order(tmp_path: Path) -> None:
    """An index made anew with the shards in another order would repeat samples: refused by each start."""
    folder, run_dir = write_index(tars(tmp_path / "shards", LENGTHS)) and tmp_path / "shards", tmp_path / "run"
    (tmp_path / "record").mkdir()
    run_forked(TRAIN, *job(folder, run_dir, "--max-steps", 2))
    assert "blocks" in read(run_dir, "status.json")["order"]
    (folder / "train-000.tar").rename(folder / "z.tar")
    write_index(folder)
    line = refusal(job(folder, run_dir, "--max-steps", 2))
    assert "the training data was read in 28 blocks" in line
    assert "and is read in 28 blocks" in line

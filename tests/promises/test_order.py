"""A task's own order, or steps of bounded tokens: each position once through kills, stops and changes of ranks."""

import json
import random
import sys
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from evenkeel.config import Config
from evenkeel.data.order import order_of, positions_in, token_batches
from evenkeel.data.plan import Plan
from evenkeel.training.task_data import training_set
from tests.support import needs
from tests.support import small_runs as runs
from tests.support.ordered_task import Own
from tests.support.processes import TRAIN, read, run_forked, start, torchrun
from tests.support.small_runs import SUPPORT, Records, ended, failed, kill_at, options, starts, trained, weights_of

TASK = f"{SUPPORT / 'ordered_task.py'}:Own"
LISTED = {"batch_size": 12, "micro_batch": 3, "drop_last": True}
"""12 steps, 4 an epoch, with two samples left out."""
TOKENS = {"batch_size": 48, "micro_batches": 4, "batch_tokens": 132}
"""12 steps, 4 an epoch, the last of each of two micro-batches instead of four; 4 to 19 samples."""


def job(run_dir: Path, way: str, *more: object) -> list[str]:
    cut = (TOKENS if way == "tokens" else LISTED).items()
    shape: list[object] = [f"--{name.replace('_', '-')}" + f"={value}" * (value is not True) for name, value in cut]
    shape += ["--epochs", 3, "--reduce", "tree", "--log-every", 1, "--checkpoint-every", 2, "--way", way]
    return options(TASK, run_dir, *shape, *more)


def expected(way: str) -> list[list[int]]:
    config = Config(epochs=3, **(TOKENS if way == "tokens" else LISTED))
    dataset = training_set(Own(way=way), config)
    order, length = order_of(dataset), positions_in(dataset)
    plan = Plan.of(config, length, token_batches(dataset))
    positions = np.arange(plan.samples, dtype=np.uint64)
    epochs = [order.shuffled(positions, config.seed, epoch).tolist() for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    ends = [plan.samples_seen(step) for step in range(plan.total_steps + 1)]
    samples = [*chain(*epochs)]
    return [samples[start:end] for start, end in pairwise(ends)]


def trained_on(folder: Path, first: int, end: int, world_size: int) -> list[list[int]]:
    """The samples of the steps first .. end of an attempt with its own record folder, those of rank 0 first."""
    steps: dict[int, list[int]] = {step: [] for step in range(first, end)}
    for rank in range(world_size):
        for step, samples, told in map(json.loads, (folder / f"rank-{rank}").read_text().splitlines()):
            assert set(told) == {step // 4}, "the data set was told the epoch, in the process that reads"
            if step in steps:
                steps[step] += samples
    return list(steps.values())


@pytest.mark.slow
@pytest.mark.parametrize(("way", "workers"), [("order", 2), needs.long("weights", 0), ("tokens", 2)])
def test_killed_and_finished_on_other_ranks_each_position_comes_once(tmp_path: Path, way: str, workers: int) -> None:
    run_dir, record = tmp_path / "run", Records(tmp_path / "record")
    words = job(run_dir, way, "--num-workers", workers, "--record", record.link)
    record.of_another_attempt()
    process = start(torchrun(2, TRAIN, *words, "--pause", 0.1))
    kill_at(killed_at := random.randrange(3, 6), run_dir, process)
    record.of_another_attempt()
    process = start(torchrun(3, TRAIN, *words, "--pause", 0.1))
    runs.stop_at(run_dir, killed_at + random.randrange(1, 4), process)
    record.of_another_attempt()
    ended(start([sys.executable, TRAIN, *words]))

    ends = [*starts(run_dir)[1:], 12]
    found = [
        step
        for folder, first, end, ranks in zip(record.folders, starts(run_dir), ends, (2, 3, 1), strict=True)
        for step in trained_on(folder, first, end, ranks)
    ]
    assert found == expected(way)
    assert read(run_dir)["samples_seen"] == 3 * (50 if way == "tokens" else 48)

    trained(0, job(tmp_path / "undisturbed", way))
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("way", "broken", "line"),
    [
        ("weights", "start", r"was read in 50 draws by sample_weights() ("),
        needs.long("order", "start", "was read in an order of 50 samples by order() ("),
        needs.long(
            "tokens", "start", "13 micro-batches, 4 in a step (--micro-batches), of at most 33 tokens by sample_l"
        ),
        ("order", "later", "order(1) is not what it was when the run was in that epoch"),
    ],
)
def test_another_order_at_a_later_start_is_refused(run_dir: Path, way: str, broken: str, line: str) -> None:
    run_forked(TRAIN, *job(run_dir, way, "--max-steps", 6, "--schedule", "constant"), warm=True)
    before = (run_dir / "status.json").read_bytes()
    again = job(run_dir, way, "--max-steps", 9, "--schedule", "constant")
    assert line in runs.refusal([*again, "--broken", broken])
    assert (run_dir / "status.json").read_bytes() == before
    assert read(run_dir, "status.json")["step"] == 6
    run_forked(TRAIN, *again, warm=True)  # the control: the same order goes on
    assert read(run_dir)["step"] == 9


def test_ranks_with_different_orders_are_refused_before_a_step_is_trained_on(tmp_path: Path) -> None:
    first, _ = failed(2, job(tmp_path / "run", "order", "--broken", "rank"), code=2)
    assert "by order() (" in first.stderr
    assert "let sample_weights() and order() return the same on all ranks" in first.stderr


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        ("rank-later", "order(1) is one order on rank 0 and another on rank 1"),
        needs.long("length", "order(1) has 49 samples and order(0) has 50"),
    ],
)
def test_a_later_epoch_that_is_wrong_ends_the_run(tmp_path: Path, run_dir: Path, broken: str, line: str) -> None:
    first, _ = failed(2, job(run_dir, "order", "--broken", broken))
    assert first.stderr.count(line) == 1
    assert read(run_dir, "status.json")["step"] == 4
    trained(2, job(run_dir, "order"))
    trained(0, job(tmp_path / "undisturbed", "order"))
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")

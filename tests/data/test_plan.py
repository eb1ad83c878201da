"""Global batch -> micro-batches -> ranks, for sizes that nothing divides."""

from __future__ import annotations

import doctest
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenkeel.data import plan as plan_module
from evenkeel.data.plan import ENDLESS, MicroBatch, Plan, share

patient = settings(deadline=None)  # a busy machine is no failure


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Cut by size or by number."""
    global_batch = draw(st.integers(1, 200))
    samples, cut, epochs = draw(st.integers(1, 2_000)), draw(st.integers(1, global_batch)), draw(st.integers(1, 3))
    by_number = draw(st.booleans())
    return (Plan.by_number if by_number else Plan)(samples, global_batch, cut, epochs)


@pytest.mark.parametrize(
    ("samples", "max_steps", "told"),
    [
        (10, 0, ["epoch 1/3", "epoch 1/3", "epoch 2/3", "epoch 3/3"]),
        (10, 6, ["epoch 1/3", "epoch 1/3", "epoch 2/3", "epoch 3/3"]),  # all of them
        (10, 5, ["epoch 1", "epoch 1", "epoch 2", "epoch 3"]),
        (10, 1, ["epoch 1"]),
        (ENDLESS - ENDLESS % 8, 5, ["", "", "", ""]),
    ],
)
def test_the_epoch_is_told_as_far_as_it_is_true(samples: int, max_steps: int, told: list[str]) -> None:
    plan = Plan(samples, global_batch=8, micro_batch=8, epochs=3, max_steps=max_steps)
    assert [plan.epoch_at(step) for step in (0, 2, 3, 5) if step <= plan.total_steps] == told


def test_the_examples_of_the_module_run() -> None:
    results = doctest.testmod(plan_module)
    assert results.attempted >= 3
    assert results.failed == 0


@patient
@given(count=st.integers(0, 10_000), world_size=st.integers(1, 500))
def test_shares_cover_everything_once_in_the_order_of_ranks(count: int, world_size: int) -> None:
    shares = [share(count, rank, world_size) for rank in range(world_size)]

    assert [i for part in shares for i in part] == list(range(count))
    assert all(part.step == 1 for part in shares)


@patient
@given(count=st.integers(0, 10_000), world_size=st.integers(1, 500))
def test_shares_differ_by_at_most_one_and_the_larger_come_first(count: int, world_size: int) -> None:
    sizes = [len(share(count, rank, world_size)) for rank in range(world_size)]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] >= min(count, 1)  # rank 0 always has work


@pytest.mark.parametrize(
    ("plan", "steps_per_epoch", "total_steps", "last_step", "max_world_size"),
    [
        (Plan(samples=1437, global_batch=64, micro_batch=8, epochs=15), 23, 345, 29, 8),
        (Plan(samples=1440, global_batch=64, micro_batch=8, epochs=1), 23, 23, 32, 8),
        (Plan(samples=1024, global_batch=64, micro_batch=8, epochs=2), 16, 32, 64, 8),
        (Plan(samples=1025, global_batch=64, micro_batch=7, epochs=2), 17, 34, 1, 10),
        (Plan(samples=1, global_batch=1, micro_batch=1, epochs=3), 1, 3, 1, 1),
        (Plan(samples=5, global_batch=64, micro_batch=3, epochs=2), 1, 2, 5, 2),  # a batch larger than the data
        (Plan(samples=10**9, global_batch=4096, micro_batch=64, epochs=90), 244_141, 21_972_690, 2_560, 64),
    ],
)
def test_steps_in_numbers(
    plan: Plan, steps_per_epoch: int, total_steps: int, last_step: int, max_world_size: int
) -> None:
    assert plan.steps_per_epoch == steps_per_epoch
    assert plan.total_steps == total_steps
    assert plan.step_samples(total_steps - 1) == last_step
    assert plan.max_world_size == max_world_size


def test_max_steps_ends_a_run_early_and_never_prolongs_it() -> None:
    def steps(max_steps: int) -> int:
        return Plan(samples=100, global_batch=30, micro_batch=30, epochs=2, max_steps=max_steps).total_steps

    assert [steps(0), steps(1), steps(7), steps(8), steps(9)] == [8, 1, 7, 8, 8]


@patient
@given(plans())
def test_samples_seen_is_the_sum_of_the_steps_and_exact_at_the_end_of_every_epoch(plan: Plan) -> None:
    seen = [plan.samples_seen(step) for step in range(plan.total_steps + 1)]

    assert seen[0] == 0
    assert [b - a for a, b in pairwise(seen)] == [plan.step_samples(step) for step in range(plan.total_steps)]
    assert seen[:: plan.steps_per_epoch] == [epoch * plan.samples for epoch in range(plan.epochs + 1)]


@patient
@given(plans())
def test_every_step_is_full_but_the_last_of_an_epoch(plan: Plan) -> None:
    for step in range(plan.total_steps):
        epoch, within = plan.locate(step)
        assert epoch * plan.steps_per_epoch + within == step
        assert 0 <= within < plan.steps_per_epoch
        if within < plan.steps_per_epoch - 1:
            assert plan.step_samples(step) == plan.global_batch
        else:
            assert 1 <= plan.step_samples(step) <= plan.global_batch


@patient
@given(plans())
def test_micro_batches_cut_every_epoch_into_consecutive_positions(plan: Plan) -> None:
    for epoch in range(plan.epochs):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        position = 0
        for step in steps:
            pieces = plan.micro_batches(step)
            assert [piece.step for piece in pieces] == [step] * len(pieces)
            assert [piece.id for piece in pieces] == list(range(len(pieces)))
            if plan.number:
                assert max(piece.size for piece in pieces) - min(piece.size for piece in pieces) <= 1
            else:
                assert all(piece.size == plan.micro_batch for piece in pieces[:-1])
                assert 1 <= pieces[-1].size <= plan.micro_batch
            for piece in pieces:
                assert piece.start == position
                position += piece.size
            assert position == plan.samples_seen(step + 1) - epoch * plan.samples
        assert position == plan.samples


@patient
@given(plan=plans(), world_size=st.integers(1, 20), data=st.data())
def test_micro_batches_do_not_depend_on_the_world_size(plan: Plan, world_size: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, plan.total_steps - 1), label="step")

    dealt = [piece for rank in range(world_size) for piece in plan.micro_batches(step, rank, world_size)]

    assert dealt == plan.micro_batches(step)


@patient
@given(plans())
def test_max_world_size_is_where_further_ranks_have_nothing_to_do(plan: Plan) -> None:
    most = plan.max_world_size

    assert plan.micro_batches(0, most - 1, most)
    assert plan.micro_batches(0, most, most + 1) == []
    assert all(plan.micro_batches(step, most, most + 1) == [] for step in range(plan.steps_per_epoch))


@patient
@given(samples=st.integers(2, 500), batch=st.integers(2, 200), number=st.integers(1, 100))
def test_a_cut_by_number(samples: int, batch: int, number: int) -> None:
    """All ranks have work in a full step, and in a short one that is large enough; no sample is alone if it can be."""
    batch = min(batch, samples)
    plan = Plan.by_number(samples, batch, max(1, min(number, batch // 2)), epochs=1)
    for step in range(plan.steps_per_epoch):
        sizes = [piece.size for piece in plan.micro_batches(step)]
        total = plan.step_samples(step)
        assert total == 1 or 1 not in sizes
        if total == batch or total >= 2 * plan.number:
            assert len(sizes) >= plan.number
        # a sample more than in a full step, where one would be alone otherwise
        assert max(sizes) <= plan.micro_batch + 1
        if total == batch:
            assert (len(sizes), max(sizes)) == (plan.number, plan.micro_batch)


@pytest.mark.parametrize(
    ("samples", "batch", "number", "full", "tail"),
    [
        (1437, 128, 2, [64, 64], [15, 14]),
        (1437, 128, 3, [43, 43, 42], [10, 10, 9]),
        (133, 128, 4, [32] * 4, [3, 2]),
        (129, 128, 4, [32] * 4, [1]),
        (13, 8, 8, [1] * 8, [1] * 5),  # one sample a rank: no more of them fit at once in the tail either
        (13, 8, 4, [2] * 4, [3, 2]),
        (15, 10, 6, [2, 2, 2, 2, 1, 1], [3, 2]),
    ],
)
def test_a_cut_by_number_in_numbers(samples: int, batch: int, number: int, full: list[int], tail: list[int]) -> None:
    plan = Plan.by_number(samples, batch, number, epochs=1)
    last = plan.steps_per_epoch - 1
    assert [[piece.size for piece in plan.micro_batches(step)] for step in (0, last)] == [full, tail]
    assert plan.max_world_size == number


def test_a_step_in_full() -> None:
    plan = Plan(samples=23, global_batch=10, micro_batch=4, epochs=2)

    assert plan.micro_batches(4, rank=0, world_size=2) == [MicroBatch(4, 0, 10, 4), MicroBatch(4, 1, 14, 4)]
    assert plan.micro_batches(4, rank=1, world_size=2) == [MicroBatch(4, 2, 18, 2)]
    assert plan.micro_batches(5, rank=0, world_size=2) == [MicroBatch(5, 0, 20, 3)]
    assert plan.micro_batches(5, rank=1, world_size=2) == []

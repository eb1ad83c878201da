"""Global batch -> micro-batches -> ranks, for sizes that nothing divides."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.data.plan import ENDLESS, Assignment, Plan, assigned, contiguous_part
from evenkeel.run.fingerprint import read_cut
from tests.data.test_loader import patient


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Cut by size or by number."""
    global_batch = draw(st.integers(1, 200))
    samples, cut, epochs = draw(st.integers(1, 2_000)), draw(st.integers(1, global_batch)), draw(st.integers(1, 3))
    by_number = draw(st.booleans())
    return (Plan.by_count if by_number else Plan)(samples, global_batch, cut, epochs)


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
    assert [plan.epoch_label(step) for step in (0, 2, 3, 5) if step <= plan.total_steps] == told


@patient
@given(count=st.integers(0, 10_000), world_size=st.integers(1, 500))
def test_shares_cover_all_once_in_the_order_of_ranks_and_the_larger_come_first(count: int, world_size: int) -> None:
    shares = [contiguous_part(count, rank, world_size) for rank in range(world_size)]
    assert [i for part in shares for i in part] == list(range(count))
    sizes = list(map(len, shares))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@patient
@given(count=st.integers(1, 1_000), world_size=st.integers(1, 100), how=st.sampled_from(["padded", "round_robin"]))
def test_where_each_pass_is_a_collective_all_ranks_have_as_many(count: int, world_size: int, how: Assignment) -> None:
    ranks = [list(assigned(count, rank, world_size, (), how)) for rank in range(world_size)]
    assert {len(ids) for ids in ranks} == {-(-count // world_size)}
    repeated = sum(map(len, ranks)) - count
    assert sorted(i for ids in ranks for i in ids) == [0] * repeated + list(range(count))
    dealt = [ids[0] for ids in ranks[:count]] == list(range(min(count, world_size)))
    assert dealt or how == "padded"


@pytest.mark.parametrize(
    ("plan", "steps_per_epoch", "total_steps", "last_step", "micro_batches"),
    [
        (Plan(samples=1437, global_batch=64, micro_batch=8, epochs=15), 23, 345, 29, 8),
        (Plan(samples=1440, global_batch=64, micro_batch=8, epochs=1), 23, 23, 32, 8),
        (Plan(samples=1024, global_batch=64, micro_batch=8, epochs=2), 16, 32, 64, 8),
        (Plan(samples=1025, global_batch=64, micro_batch=7, epochs=2), 17, 34, 1, 10),
        (Plan(samples=1, global_batch=1, micro_batch=1, epochs=3), 1, 3, 1, 1),
        (Plan(samples=5, global_batch=64, micro_batch=3, epochs=2), 1, 2, 5, 2),  # a batch larger than the data
        (Plan(samples=10**9, global_batch=4096, micro_batch=64, epochs=90), 244_141, 21_972_690, 2_560, 64),
        *(  # a run ends early, and is never prolonged
            (Plan(samples=100, global_batch=30, micro_batch=30, epochs=2, max_steps=most), 4, steps, last, 1)
            for most, steps, last in [(0, 8, 10), (1, 1, 30), (7, 7, 30), (8, 8, 10), (9, 8, 10)]
        ),
    ],
)
def test_steps_counted(plan: Plan, steps_per_epoch: int, total_steps: int, last_step: int, micro_batches: int) -> None:
    assert (plan.steps_per_epoch, plan.total_steps) == (steps_per_epoch, total_steps)
    assert plan.step_samples(plan.total_steps - 1) == last_step
    assert plan.micro_batches_per_step == micro_batches


@patient
@given(plans())
def test_every_step_is_full_but_the_last_of_an_epoch_and_samples_seen_is_their_sum(plan: Plan) -> None:
    seen = [plan.samples_seen(step) for step in range(plan.total_steps + 1)]
    sizes = [plan.step_samples(step) for step in range(plan.total_steps)]
    assert seen[0] == 0
    assert [b - a for a, b in pairwise(seen)] == sizes
    assert seen[:: plan.steps_per_epoch] == [epoch * plan.samples for epoch in range(plan.epochs + 1)]
    for step, size in enumerate(sizes):
        assert plan.locate(step) == divmod(step, plan.steps_per_epoch)
        last = (step + 1) % plan.steps_per_epoch == 0
        assert (1 if last else plan.global_batch) <= size <= plan.global_batch


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
            if plan.fixed_micro_batches:
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
    most = plan.micro_batches_per_step
    assert plan.micro_batches(0, most - 1, most)
    assert plan.micro_batches(step, most, most + 1) == []


@patient
@given(plan=plans())
def test_a_cut_reads_as_the_option_that_makes_it(plan: Plan) -> None:
    fixed = plan.fixed_micro_batches
    option = ("micro_batches", fixed) if fixed else ("micro_batch", plan.micro_batch)
    assert read_cut(plan.cut) == option


@patient
@given(samples=st.integers(2, 500), batch=st.integers(2, 200), number=st.integers(1, 100))
def test_a_cut_by_number(samples: int, batch: int, number: int) -> None:
    """All ranks have work in a full step, and in a short one that is large enough; no sample is alone if it can be."""
    batch = min(batch, samples)
    plan = Plan.by_count(samples, batch, max(1, min(number, batch // 2)), epochs=1)
    for step in range(plan.steps_per_epoch):
        sizes = [piece.size for piece in plan.micro_batches(step)]
        total = plan.step_samples(step)
        assert total == 1 or 1 not in sizes
        if total == batch or total >= 2 * plan.fixed_micro_batches:
            assert len(sizes) >= plan.fixed_micro_batches
        # a sample more than in a full step, where one would be alone otherwise
        assert max(sizes) <= plan.micro_batch + 1
        if total == batch:
            assert (len(sizes), max(sizes)) == (plan.fixed_micro_batches, plan.micro_batch)


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
    plan = Plan.by_count(samples, batch, number, epochs=1)
    last = plan.steps_per_epoch - 1
    assert [[piece.size for piece in plan.micro_batches(step)] for step in (0, last)] == [full, tail]
    assert plan.micro_batches_per_step == number

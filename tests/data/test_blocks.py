"""The order in blocks: a permutation, near where it should be, and the same through stops and other world sizes."""

import doctest
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.common.errors import Refusal
from evenkeel.data import blocks as blocks_module
from evenkeel.data import order as order_module
from evenkeel.data import plan as plan_module
from evenkeel.data import sampler as sampler_module
from evenkeel.data.blocks import Blocks, blocks_of
from evenkeel.data.dataset import Limited, limited, split
from evenkeel.data.order import order_name
from evenkeel.data.sampler import ElasticSampler
from tests.data.test_loader import NONE, Batches, Job, Schedule, damage, dealt, jobs, patient, schedules


class Blocked:
    """Samples in blocks of these lengths."""

    def __init__(self, lengths: list[int], window: int) -> None:
        self.lengths, self.window = lengths, window

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> int:
        return index

    def order_blocks(self) -> Blocks:
        return Blocks(self.lengths, self.window)


def order(blocks: Blocks, seed: int = 0, epoch: int = 0) -> list[int]:
    return blocks.shuffled(np.arange(blocks.lengths.sum(), dtype=np.uint64), seed, epoch).tolist()


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any)


@patient
@given(lengths=lengths, window=st.integers(1, 8), epoch=st.integers(0, 3), data=st.data())
def test_each_sample_comes_once_and_any_position_can_be_asked_alone(
    lengths: list[int], window: int, epoch: int, data: st.DataObject
) -> None:
    blocks = Blocks(lengths, window)
    whole = order(blocks, 7, epoch)
    assert sorted(whole) == list(range(sum(lengths)))
    asked = data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=5))
    assert blocks.shuffled(np.array(asked, dtype=np.uint64), 7, epoch).tolist() == [whole[p] for p in asked]


@patient
@given(job=jobs(), schedule=schedules, block=st.integers(1, 9), window=st.integers(1, 5))
def test_stops_and_resizes_leave_no_trace(job: Job, schedule: Schedule, block: int, window: int) -> None:
    def deal(job: Job, world_size: int, epoch: int, first_step: int) -> Iterator[Batches]:
        full, rest = divmod(job.samples, block)
        dataset = Blocked([block] * full + [rest], window)
        make = partial(ElasticSampler, dataset, job.global_batch, job.micro_batch, seed=job.seed)
        return dealt([make(num_replicas=world_size, rank=rank) for rank in range(world_size)], epoch, first_step)

    assert damage(deal, job, schedule) == NONE


def test_a_window_reads_a_few_blocks_and_mixes_them() -> None:
    blocks = Blocks([10] * 64, window=8)
    by_window = np.array(order(blocks)).reshape(8, 80) // 10
    assert [len(set(window)) for window in by_window.tolist()] == [8] * 8
    neighbours = np.mean([np.mean(window[1:] == window[:-1]) for window in by_window])
    assert neighbours < 0.25, "of the same block, where chance is 0.11"
    assert order(blocks, epoch=1) != order(blocks) != order(blocks, seed=1)


def test_blocks_come_in_all_orders_and_windows_in_all_of_theirs() -> None:
    firsts = [order(Blocks([3] * 4, window=2), seed)[0] for seed in range(2400)]
    assert np.bincount(firsts, minlength=12).min() > 140, "of 200 expected"


def test_a_subset_in_order_keeps_its_blocks() -> None:
    base = Blocked([4, 3, 5], window=2)
    found = blocks_of(Limited(base, [0, 3, 4, 11]))
    assert found.lengths.tolist() == [2, 1, 1]
    assert sorted(order(found)) == [0, 1, 2, 3]
    assert blocks_of(Limited(base, [3, 0])) is None, "its own order is meant"
    assert blocks_of(Limited(range(9), [0, 1])) is None
    assert all(map(blocks_of, [limited(base, 5), *split(base, 0.3, 0)]))
    base.order_blocks = lambda: Blocks([6] * 4, 1)  # type: ignore[method-assign]
    with pytest.raises(Refusal, match="12 samples returned Blocks of 24 samples"):
        blocks_of(base)


def test_other_data_sets_keep_the_usual_order() -> None:
    usual = list(ElasticSampler(range(24), 8, 8, num_replicas=1, rank=0))
    mixed = list(ElasticSampler(Blocked([6] * 4, 1), 8, 8, num_replicas=1, rank=0))
    assert sorted(chain(*mixed)) == sorted(chain(*usual)) == list(range(24))
    assert mixed != usual
    assert order_name(range(24)) == ""
    assert order_name(Blocked([6] * 4, 1)) != order_name(Blocked([6] * 4, 2)) != order_name(Blocked([3] * 8, 2))
    in_turn = ElasticSampler(Blocked([6] * 4, 1), 8, 8, num_replicas=1, rank=0, shuffle=False)
    assert [*chain(*in_turn)] == list(range(24))


@pytest.mark.parametrize("module", [blocks_module, order_module, plan_module, sampler_module])
def test_the_examples_in_docstrings(module: Any) -> None:
    results = doctest.testmod(module, extraglobs={"np": np})
    assert results.attempted >= 2
    assert not results.failed

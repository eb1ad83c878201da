"""No sample skipped, none seen twice, whatever the ranks do: the sampler, and the batches behind it."""

import gc
import random
import sys
import time
import tracemalloc
from collections import Counter, OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, find, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from evenkeel.common.errors import EndedByData
from evenkeel.data.batch import to_device
from evenkeel.data.dataset import InMemory, Limited, length, limited, sample_of
from evenkeel.data.loader import Seeded, make_loader
from evenkeel.data.plan import ENDLESS, MicroBatch
from evenkeel.data.sampler import ElasticSampler, Indices, by_step
from evenkeel.data.shuffle import shuffled
from tests.distributed.test_transfer import Both
from tests.support.processes import LIMIT

CPU = torch.device("cpu")
patient = settings(deadline=None)  # a busy machine is no failure


class Job(NamedTuple):
    """All that a user configures; no world size."""

    samples: int
    global_batch: int
    micro_batch: int
    seed: int = 0
    epochs: int = 1


Batches = list[list[int]]
"""Samples of every micro-batch of a step, rank after rank."""


Deal = Callable[[Job, int, int, int], Iterator[Batches]]
"""(job, world size, epoch, first step) -> the steps from there to the end of the epoch."""


Schedule = Sequence[tuple[int, int]]
"""(world size, steps until the next stop), over and over until the epochs are done."""


ALONE: Schedule = [(1, 10**9)]
HALFWAY: Schedule = [(4, 5), (2, 10**9)]
"""Four ranks do 5 steps of 100 samples, then two the rest."""
THOUSAND = Job(samples=1000, global_batch=100, micro_batch=25)


class Damage(NamedTuple):
    """What a schedule did to a job, compared with an undisturbed run on one rank."""

    skipped: int
    repeated: int
    other_steps: bool
    other_micro_batches: bool


NONE = Damage(skipped=0, repeated=0, other_steps=False, other_micro_batches=False)


def history(deal: Deal, job: Job, schedule: Schedule) -> list[list[Batches]]:
    """What is trained on, by epoch and step, when the job is stopped and resized all the time."""
    attempts = cycle(schedule)
    world_size, left = next(attempts)
    epochs = []
    for epoch in range(job.epochs):
        done: list[Batches] = []
        over = False
        while not over and len(done) <= job.samples:  # or it would never end, if it started over every time
            attempt = list(islice(deal(job, world_size, epoch, len(done)), left))
            over = len(attempt) < left
            done += attempt
            left -= len(attempt)
            if not left:  # stopped; perhaps right at the end of the epoch, or with nothing left to do in it
                world_size, left = next(attempts)
        epochs.append(done)
    return epochs


def damage(deal: Deal, job: Job, schedule: Schedule) -> Damage:
    expected, found = history(deal, job, ALONE), history(deal, job, schedule)
    seen = [Counter(chain.from_iterable(chain.from_iterable(epoch))) for epoch in found]
    return Damage(
        skipped=sum(sample not in epoch for epoch in seen for sample in range(job.samples)),
        repeated=sum(times - 1 for epoch in seen for times in epoch.values()),
        other_steps=[list(map(multiset, epoch)) for epoch in found] != [list(map(multiset, e)) for e in expected],
        other_micro_batches=found != expected,
    )


def multiset(step: Batches) -> list[int]:
    return sorted(chain.from_iterable(step))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    samples = draw(st.integers(1, 60))
    global_batch = draw(st.integers(1, min(samples + 3, 24)))
    micro_batch = draw(st.integers(1, global_batch))
    return Job(samples, global_batch, micro_batch, draw(st.integers(0, 2**63 - 1)), draw(st.integers(1, 2)))


schedules = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5)


def evenkeel(job: Job, world_size: int, epoch: int, first_step: int) -> Iterator[Batches]:
    return dealt([elastic(job, world_size, rank) for rank in range(world_size)], epoch, first_step)


def dealt(samplers: Sequence[ElasticSampler], epoch: int, first_step: int) -> Iterator[Batches]:
    """What these samplers, one a rank, give from a step on."""
    for sampler in samplers:
        sampler.set_epoch(epoch, first_step)
    for ranks in zip(*(by_step(sampler, sampler) for sampler in samplers), strict=True):
        assert len({step for step, _, _ in ranks}) == 1
        yield [list(batch) for _, _, batches in ranks for batch in batches]


def torch_elastic(job: Job, world_size: int, epoch: int, first_step: int) -> Iterator[Batches]:
    """torch's sampler for elastic jobs, told how many samples are done."""
    ranks = []
    for rank in range(world_size):
        start = first_step * job.global_batch
        if start >= job.samples:
            return
        sampler = ElasticDistributedSampler(range(job.samples), world_size, rank, start)
        sampler.set_epoch(epoch)
        ranks.append(in_batches(list(sampler), max(1, job.global_batch // world_size)))
    yield from map(list, zip(*ranks, strict=True))


def torch_skipping(job: Job, world_size: int, epoch: int, first_step: int) -> Iterator[Batches]:
    """torch's plain sampler; after a stop every rank skips the batches it has done. A batch per rank and step."""
    ranks = []
    for rank in range(world_size):
        sampler = DistributedSampler(range(job.samples), world_size, rank, seed=job.seed % 2**32)
        sampler.set_epoch(epoch)
        ranks.append(in_batches(list(sampler), job.micro_batch)[first_step:])
    yield from map(list, zip(*ranks, strict=True))


def torch_skipping_samples(job: Job, world_size: int, epoch: int, first_step: int) -> Iterator[Batches]:
    """The same by a careful user, who divides the global batch by the world size."""
    job = job._replace(micro_batch=max(1, job.global_batch // world_size))
    return torch_skipping(job, world_size, epoch, first_step)


def in_batches(samples: list[int], size: int) -> Batches:
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def elastic(job: Job, world_size: int = 1, rank: int = 0, *, shuffle: bool = True) -> ElasticSampler:
    return ElasticSampler(
        range(job.samples),
        job.global_batch,
        job.micro_batch,
        num_replicas=world_size,
        rank=rank,
        shuffle=shuffle,
        seed=job.seed,
    )


@patient
@given(job=jobs(), schedule=schedules)
@example(Job(1437, 64, 3, seed=1, epochs=2), [(4, 5), (1, 2), (7, 1), (3, 9), (30, 4), (2, 6)])
@example(Job(100, 10, 3, epochs=3), [(4, 10), (3, 10), (2, 10)])  # stopped at the end of each epoch
@example(THOUSAND, HALFWAY)
def test_stops_and_resizes_leave_no_trace(job: Job, schedule: Schedule) -> None:
    assert damage(evenkeel, job, schedule) == NONE


@patient
@given(job=jobs())
def test_a_single_rank_follows_the_order_of_the_epoch(job: Job) -> None:
    """What the property compares with is right itself."""
    for epoch, steps in enumerate(history(evenkeel, job, ALONE)):
        order = shuffled(np.arange(job.samples, dtype=np.uint64), job.samples, job.seed, epoch).tolist()
        assert [list(chain.from_iterable(step)) for step in steps] == in_batches(order, job.global_batch)
        assert steps == [in_batches(list(chain.from_iterable(step)), job.micro_batch) for step in steps]


@pytest.mark.parametrize(
    ("deal", "samples", "schedule", "skipped", "repeated"),
    [
        (torch_elastic, 1000, HALFWAY, 252, 252),
        (torch_elastic, 1000, [(4, 5), (4, 10**9)], 252, 252),  # even on as many ranks
        (torch_elastic, 1000, [(4, 10**9)], 0, 0),  # undisturbed it is right
        (torch_skipping, 1000, HALFWAY, 0, 250),
        (torch_skipping, 1000, [(2, 5), (4, 10**9)], 250, 0),
        (torch_skipping, 1000, [(4, 5), (4, 10**9)], 0, 0),  # on as many ranks it is right
        (torch_skipping_samples, 1000, HALFWAY, 0, 0),  # right, because everything divides
        (torch_skipping_samples, 1001, [(4, 10**9)], 0, 3),  # padding
        (torch_skipping_samples, 1000, [(4, 5), (3, 10**9)], 0, 7),
    ],
)
def test_control_torchs_samplers_fail(
    deal: Deal, samples: int, schedule: Schedule, skipped: int, repeated: int
) -> None:
    assert damage(deal, THOUSAND._replace(samples=samples), schedule)[:2] == (skipped, repeated)


@pytest.mark.parametrize("deal", [torch_elastic, torch_skipping, torch_skipping_samples])
def test_control_the_property_finds_a_counterexample_to_the_samplers_of_torch(deal: Deal) -> None:
    """The very strategies that find none for `ElasticSampler`, even where a step can be cut evenly."""

    def loses_samples(case: tuple[Job, Schedule]) -> bool:
        job, schedule = case
        if any(job.global_batch % world_size for world_size, _ in schedule):
            return False
        found = damage(deal, job, schedule)
        return found.skipped > 0 or found.repeated > 0

    fixed = settings(derandomize=True, database=None, max_examples=1_000)
    job, schedule = find(st.tuples(jobs(), schedules), loses_samples, settings=fixed)

    assert damage(deal, job, ALONE)[:2] == (0, 0)  # undisturbed on one rank, nothing is wrong with it
    assert damage(evenkeel, job, schedule) == NONE


def test_seed_and_epoch_decide_the_order_and_shuffling_can_be_off() -> None:
    def order(seed: int = 0, epoch: int = 0, shuffle: bool = True) -> list[Indices]:
        sampler = elastic(Job(samples=50, global_batch=10, micro_batch=5, seed=seed), shuffle=shuffle)
        sampler.set_epoch(epoch)
        found = list(sampler)
        assert list(sampler) == found, "the documented warning: without set_epoch the same order again"
        return found

    assert order() == order()
    assert order() != order(seed=1)
    assert order() != order(epoch=1)
    assert list(chain.from_iterable(order(epoch=3, shuffle=False))) == list(range(50))


@patient
@given(job=jobs(), world_size=st.integers(1, 9), data=st.data())
def test_len_is_the_number_of_batches_that_are_left(job: Job, world_size: int, data: st.DataObject) -> None:
    sampler = elastic(job, world_size, data.draw(st.integers(0, world_size - 1), label="rank"))
    sampler.set_epoch(1, data.draw(st.integers(0, sampler.plan.steps_per_epoch), label="first step"))
    assert len(sampler) == len(list(sampler))


def test_a_resume_in_a_billion_samples_looks_at_one_block_only() -> None:
    samples, global_batch = 10**9, 4096
    last = samples // global_batch
    tracemalloc.start()
    try:
        untouched: Any = type("Untouched", (), {"__len__": lambda _: samples})()  # whose samples nobody can fetch
        sampler = ElasticSampler(untouched, global_batch, 64, num_replicas=8, rank=7)
        sampler.set_epoch(89, first_step=last)
        step, mine, _ = next(by_step(sampler, sampler))
        first = next(iter(sampler))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert step == 89 * (last + 1) + last
    assert len(mine) == 5  # of the 40 in the last step, which has 2,560 samples
    assert first.micro_batch == MicroBatch(step, id=35, start=last * global_batch + 35 * 64, size=64)
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("world_size", "rank", "expected"),
    [  # 4 micro-batches, then 2
        (3, 0, [(2, [0, 1], [[0, 1, 2], [3, 4, 5]]), (3, [0], [[10, 11, 12]])]),
        (3, 1, [(2, [2], [[6, 7, 8]]), (3, [1], [[13]])]),
        (3, 2, [(2, [3], [[9]]), (3, [], [])]),
        (6, 5, [(2, [], []), (3, [], [])]),
    ],
)
def test_by_step_gives_every_step_also_to_a_rank_that_has_nothing_to_do_in_it(
    world_size: int, rank: int, expected: list[tuple[int, list[int], Batches]]
) -> None:
    sampler = elastic(Job(samples=14, global_batch=10, micro_batch=3), world_size, rank, shuffle=False)
    sampler.set_epoch(1)
    found = [(s, [m.id for m in mine], [list(b) for b in batches]) for s, mine, batches in by_step(sampler, sampler)]
    assert found == expected


def test_a_number_of_micro_batches_that_would_be_larger_than_allowed_is_refused() -> None:
    make = partial(ElasticSampler, range(15), 8, num_replicas=1, rank=0, shuffle=False)
    with pytest.raises(ValueError, match="micro_batches=2 cuts 8 samples into batches of 4, and micro_batch is 3"):
        make(3, micro_batches=2)
    assert [*map(len, make(4, micro_batches=2))] == [4, 4, 4, 3] == [*map(len, make(7, micro_batches=2))]


def test_an_idle_rank_does_not_search_an_endless_stream_for_its_first_micro_batch() -> None:
    data: Any = range(ENDLESS)
    sampler = ElasticSampler(data, 8, 4, num_replicas=3, rank=2)
    found = [*islice(by_step(make_loader(data, sampler, "train", 1, CPU), sampler), 3)]
    assert [(step, mine, [*batches]) for step, mine, batches in found] == [(0, [], []), (1, [], []), (2, [], [])]


class Augmenting(Dataset[Any]):
    """Random numbers of every kind in every sample, and a first batch that takes its time."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < 3:
            time.sleep(0.02)
        return {"index": index, "torch": torch.rand(2), "python": random.random(), "numpy": np.random.rand(2)}


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: value.tolist() for key, value in batch.items()}


def epoch_of(batches: DataLoader[Any], sampler: Any, epoch: int) -> list[dict[str, Any]]:
    sampler.set_epoch(epoch)
    return [as_lists(batch) for batch in batches]


def by_sample(batches: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    return {
        values[0]: values[1:]
        for batch in batches
        for values in zip(batch["index"], batch["torch"], batch["python"], batch["numpy"], strict=True)
    }


AUGMENTED = Job(samples=29, global_batch=12, micro_batch=4, seed=5)


def augmented(
    world_size: int, rank: int, epoch: int, purpose: str = "train", job: Job = AUGMENTED
) -> list[dict[str, Any]]:
    sampler = elastic(job, world_size, rank)
    return epoch_of(make_loader(Augmenting(job.samples), sampler, purpose, 0, CPU), sampler, epoch)


def test_loader_processes_go_where_the_sampler_is_sent_whatever_they_have_loaded_ahead() -> None:
    sampler, plain = elastic(AUGMENTED), elastic(AUGMENTED)
    batches = make_loader(Augmenting(29), sampler, "train", 2, CPU)
    expected = make_loader(Augmenting(29), plain, "train", 0, CPU)
    # (epoch, its first step, batches until it is broken off): on, on after a stop, back, far ahead, and on again
    for epoch, first_step, taken in ((0, 0, 99), (1, 0, 2), (1, 1, 99), (2, 0, 99), (0, 2, 99), (7, 0, 1), (8, 0, 99)):
        for each in (sampler, plain):
            each.set_epoch(epoch, first_step)
        found, ours = (list(map(as_lists, islice(each, taken))) for each in (batches, expected))
        assert found == ours
        assert [batch["index"] for batch in ours] == list(plain)[:taken]
    assert list(make_loader(Augmenting(29), elastic(AUGMENTED, 9, 8), "train", 1, CPU)) == [], "a rank without work"


def test_loader_processes_of_earlier_epochs_are_forgotten() -> None:
    batches = make_loader(Augmenting(29), elastic(AUGMENTED), "train", 1, CPU, ahead=False)
    known = []
    for _epoch in range(3):
        assert len(list(batches)) == 8
        gc.collect()
        known.append(sum(issubclass(type(it), BaseProcess) for it in gc.get_objects()))
    assert known[0] == known[1] == known[2]


class Counting(Dataset[int]):
    """Counts the samples that loader processes have loaded."""

    def __init__(self) -> None:
        self.loaded = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return index


@pytest.mark.parametrize("purpose", ["train", "test"])
def test_loader_processes_begin_the_next_epoch_before_it_is_asked_for(purpose: str) -> None:
    """The control is a data set for evaluations, each of which is the same epoch."""
    dataset, sampler = Counting(), elastic(Job(samples=8, global_batch=4, micro_batch=2))
    batches = make_loader(dataset, sampler, purpose, 1, CPU)
    for _step, _mine, theirs in by_step(batches, sampler):
        list(theirs)
    ahead = 8 + 2 * 2 if purpose == "train" else 8  # two batches of the next epoch, torch's prefetch of a process
    deadline = time.monotonic() + (LIMIT if purpose == "train" else 0.5)
    while dataset.loaded.item() < 8 + 2 * 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert dataset.loaded.item() == ahead


@pytest.mark.parametrize("change_at", [2, 3], ids=["between epochs", "within an epoch"])
def test_when_shares_change_what_was_loaded_ahead_is_not_used(change_at: int) -> None:
    """The loader process has begun the next epoch by the old shares."""
    sampler = elastic(Job(samples=8, global_batch=4, micro_batch=1), 2, 0)
    batches, found, step = make_loader(Counting(), sampler, "train", 1, CPU), list[list[Any]](), 0
    while step < 6:
        sampler.set_epoch(*divmod(step, 2))
        sampler.per_rank = (3, 1) if step >= change_at else ()
        for number, mine, theirs in by_step(batches, sampler):
            samples = [each.tolist() for each in theirs]
            assert len(samples) == len(mine) == (3 if number >= change_at else 2)
            found.append(samples)
            step += 1
            if step == change_at == 3:
                break
    again = elastic(Job(samples=8, global_batch=4, micro_batch=1), 2, 0)
    again.set_epoch(2)
    again.per_rank = (3, 1)
    assert found[4:] == [[list(each) for each in again][part] for part in (slice(3), slice(3, 6))]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_augmentation_is_the_same_at_any_world_size_and_after_a_resume(world_size: int) -> None:
    torch.rand(world_size), random.random(), np.random.rand()  # what went before does not matter
    alone = augmented(1, 0, epoch=1)
    ranks = [batch for rank in range(world_size) for batch in augmented(world_size, rank, epoch=1)]
    assert sorted(ranks, key=lambda batch: batch["index"]) == sorted(alone, key=lambda batch: batch["index"])
    sampler = elastic(AUGMENTED)
    sampler.set_epoch(1, first_step=1)
    assert [as_lists(batch) for batch in make_loader(Augmenting(29), sampler, "train", 0, CPU)] == alone[3:]


@pytest.mark.parametrize(
    "dataset",
    [
        Augmenting(29),
        Subset(Augmenting(60), range(3, 32)),  # has a `__getitems__` that loops over samples
        limited(Augmenting(58), 29),
        limited(Subset(Augmenting(60), range(1, 59)), 29),
    ],
    ids=["whole", "subset", "limited", "limited subset"],
)
def test_augmentation_belongs_to_the_sample_and_not_to_its_batch_or_position(dataset: Any) -> None:
    def noise(job: Job, shuffle: bool = True) -> dict[int, tuple[Any, ...]]:
        sampler = elastic(job, shuffle=shuffle)
        return by_sample(epoch_of(make_loader(dataset, sampler, "train", 0, CPU), sampler, 1))

    found = noise(AUGMENTED)
    assert found == noise(AUGMENTED._replace(global_batch=10, micro_batch=7)) == noise(AUGMENTED, shuffle=False)
    assert len({str(values) for values in found.values()}) == 29


def test_augmentation_differs_between_epochs_seeds_purposes_and_samples() -> None:
    first = by_sample(augmented(1, 0, epoch=0))
    others = [
        by_sample(augmented(1, 0, epoch=1)),
        by_sample(augmented(1, 0, epoch=0, purpose="test")),
        by_sample(augmented(1, 0, epoch=0, job=AUGMENTED._replace(seed=6))),
    ]
    for other in others:
        assert other.keys() == first.keys()
        for mine, its in zip(first.values(), (other[sample] for sample in first), strict=True):
            assert all(a != b for a, b in zip(mine, its, strict=True))
    for number in range(3):
        assert len({str(values[number]) for values in first.values()}) == len(first)


def test_control_in_a_plain_loader_augmentation_depends_on_the_number_of_workers() -> None:
    def epoch(num_workers: int) -> dict[int, tuple[Any, ...]]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        sampler = DistributedSampler(range(29), num_replicas=1, rank=0)
        plain = DataLoader(Augmenting(29), batch_size=4, sampler=sampler, num_workers=num_workers)
        return by_sample(epoch_of(plain, sampler, 0))

    alone, with_workers = epoch(0), epoch(2)
    assert epoch(0) == alone
    assert with_workers.keys() == alone.keys()
    assert with_workers != alone


class AugmentedInMemory(InMemory):
    """Fetches whole micro-batches, with random noise."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        (values,) = super().__getitems__(indices)
        return values, torch.rand(len(indices))


def test_augmentation_of_whole_micro_batches_is_the_same_at_any_world_size_and_differs_between_them() -> None:
    def epoch(world_size: int) -> dict[tuple[int, ...], tuple[float, ...]]:
        found = {}
        for rank in range(world_size):
            sampler = elastic(AUGMENTED, world_size, rank)
            for samples, noise in make_loader(AugmentedInMemory(torch.arange(29)), sampler, "train", 0, CPU):
                found[tuple(samples.tolist())] = tuple(noise.tolist())
        return found

    assert epoch(3) == epoch(1)
    assert len({noise[0] for noise in epoch(1).values()}) == len(epoch(1)) == 8


class Ragged(Dataset[Any]):
    """Samples of many lengths, of which only the data set itself makes a batch; it keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, list[int]]] = []

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index % 5 + 1,), index)

    def __getitems__(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append((indices.epoch, indices.micro_batch.start, list(indices)))
        return torch.tensor([int(self[index][0]) for index in indices]), torch.rand(len(indices))


def test_some_samples_of_a_data_set_that_collates_for_itself_are_collated_by_it() -> None:
    sampler = elastic(Job(samples=6, global_batch=4, micro_batch=2), shuffle=False)
    ragged = Ragged()
    few = limited(ragged, 6)
    batches = list(make_loader(few, sampler, "train", 0, CPU))
    assert [values.tolist() for values, _ in batches] == [[0, 10], [20, 30], [40, 50]]
    assert ragged.asked == [(0, 0, [0, 10]), (0, 2, [20, 30]), (0, 4, [40, 50])]
    again = list(make_loader(limited(few, 5), elastic(Job(5, 4, 2), shuffle=False), "train", 0, CPU))
    assert [values.tolist() for values, _ in again] == [[0, 10], [20, 30], [40]]
    assert torch.equal(again[0][1], batches[0][1]), "seeded from where the micro-batch starts"


DTYPES = [torch.uint8, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.float64, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn, samples: int = 12) -> torch.Tensor:
    """Of shape [samples, ...], its dimensions in any order in memory, as of images from a NumPy array."""
    shape = [samples, *draw(st.lists(st.integers(0, 3), max_size=4))]
    order = draw(st.permutations(range(len(shape))))
    stored = torch.randint(0, 100, [shape[i] for i in order]).to(draw(st.sampled_from(DTYPES)))
    return stored.permute([order.index(i) for i in range(len(shape))])


@st.composite
def parts(draw: st.DrawFn, whole: Any) -> Any:
    """A data set, or a part of a part of it, by torch's `Subset` and by ours."""
    for kind in draw(st.lists(st.sampled_from([Subset, Limited]), max_size=3)):
        chosen = draw(st.lists(st.integers(-len(whole), len(whole) - 1), min_size=1, max_size=9))
        whole = kind(whole, torch.tensor(chosen) if draw(st.booleans()) else chosen)
    return whole


def layout(tensor: torch.Tensor) -> list[Any]:
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return [tensor.dtype, tensor.shape, *(stride for stride, size in strides if size > 1 and tensor.numel())]


@patient
@given(st.data())
def test_batches_of_tensors_are_those_of_default_collate(given: st.DataObject) -> None:
    """In values, types, containers and layout, whether they are fetched whole or not."""
    columns = given.draw(st.lists(tensors(), min_size=1, max_size=3))
    dataset = given.draw(parts(given.draw(st.sampled_from([TensorDataset, InMemory]))(*columns)))
    samples = given.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=5))
    found = Seeded(dataset, 0, "train").__getitems__(Indices(samples, 0, MicroBatch(0, 0, 0, len(samples))))
    expected = default_collate([dataset[sample] for sample in samples])
    if type(found) is tuple:  # `InMemory` makes its own batches
        assert [t.tolist() for t in found] == [t.tolist() for t in expected]
    else:
        assert type(found) is type(expected)
        assert [layout(tensor) for tensor in found] == [layout(tensor) for tensor in expected]
        assert all(map(torch.equal, found, expected))


def fetched_whole(dataset: Any) -> bool:
    """Whether batches come without a call of the data set's `__getitem__`, which is seen by a profiler."""
    calls: list[Any] = []
    own = {cls.__dict__["__getitem__"].__code__ for cls in type(dataset).__mro__ if "__getitem__" in cls.__dict__}
    sys.setprofile(lambda frame, event, _: calls.append(event) if frame.f_code in own else None)
    try:
        Seeded(dataset, 0, "train").__getitems__(Indices([2, 1], 0, MicroBatch(0, 0, 0, 2)))
    finally:
        sys.setprofile(None)
    return not calls


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + torch.rand(())


def test_what_is_only_tensors_is_fetched_whole_and_what_has_code_of_its_own_is_not() -> None:
    images, labels = torch.randn(20, 3, 4, 5), torch.arange(20)
    plain, memory = TensorDataset(images, labels), InMemory(labels)
    train, test = random_split(plain, [15, 5])
    whole = [
        plain,
        train,
        test,
        Subset(train, range(3, 9)),
        limited(train, 7),
        limited(plain, 5),
        Subset(memory, [1, 2, 3]),
    ]
    whole += [TensorDataset(torch.randn(20, 4, 5, 3).permute(0, 3, 1, 2)), TensorDataset(images[::2])]
    assert list(map(fetched_whole, whole)) == [True] * len(whole)
    own = [Noisy(labels), Subset(Noisy(labels), range(9)), limited(Noisy(labels), 9), StackDataset(plain)]
    own += [TensorDataset(nn.Parameter(images))]
    assert list(map(fetched_whole, own)) == [False] * len(own)


@pytest.mark.parametrize("error", [StopIteration, GeneratorExit])
def test_an_error_that_would_end_a_loop_or_a_loader_process_is_told_in_a_line(error: type[BaseException]) -> None:
    class Raising(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise error

    with pytest.raises(EndedByData, match=rf"__getitem__ raised {error.__name__} at .*test_loader.py:\d+: an iterator"):
        Seeded(Raising(torch.arange(3)), 3, "train").__getitems__(Indices([2, 1], 0, MicroBatch(0, 0, 0, 2)))


@dataclass(frozen=True)
class FixedError(Exception):
    name: str


@pytest.mark.parametrize(
    ("error", "notes"), [(ValueError("bad"), ["of the user", "(sample 7)"]), (FixedError("bad"), ["of the user"])]
)
def test_the_note_of_a_sample_hides_neither_an_error_nor_its_notes(error: Exception, notes: list[str]) -> None:
    class Raising(Noisy):
        def __getitem__(self, index: int) -> Any:
            vars(error)["__notes__"] = ["of the user"]
            raise error

    with pytest.raises(type(error)) as caught:
        sample_of(Subset(Raising(torch.arange(9)), [5, 7]), 1)
    assert vars(caught.value)["__notes__"] == notes


Pair = namedtuple("Pair", ["left", "right"])


def test_to_device_moves_the_tensors_of_nested_batches() -> None:
    meta, zeros = torch.device("meta"), torch.zeros(2)
    batch = UserDict(
        pair=Pair(zeros, {"deep": zeros}),
        more=(zeros, [zeros, "name", 3], None),
        both=Both(zeros, "name"),
        order=OrderedDict(x=zeros),
        packed=nn.utils.rnn.pack_sequence([zeros]),
    )
    moved = to_device(batch, meta)
    pair, more, both, order, packed = moved.values()
    kinds = [type(moved), type(pair), type(more), type(more[1]), type(both), type(order)]
    assert kinds == [UserDict, Pair, tuple, list, Both, OrderedDict]
    assert (more[1][1:], more[2], both.name) == (["name", 3], None, "name")
    tensors = [pair.left, pair.right["deep"], more[0], more[1][0], both.image, order["x"], packed.data]
    assert {tensor.device for tensor in tensors} == {meta}
    assert packed.batch_sizes.device == CPU, "it must stay on the host"
    assert batch["more"][0] is zeros
    assert to_device(zeros, meta).device == meta


NESTED = [{"pair": Pair(torch.full((2,), i), float(i)), "nested": (i, (i, "text"))} for i in range(6)]
"""What real data sets return: everything that torch can collate."""


def test_a_loader_collates_what_torch_collates() -> None:
    sampler = elastic(Job(samples=6, global_batch=6, micro_batch=3), shuffle=False)
    batches = list(make_loader(NESTED, sampler, "train", 0, CPU))
    assert str(batches) == str(list(DataLoader(NESTED, batch_size=3)))
    assert type(batches[0]["pair"]) is Pair
    assert to_device(batches[0], torch.device("meta"))["nested"][1][0].device.type == "meta"


@pytest.mark.parametrize("shapes", [(3, 4), ("circle", "cube"), ((4, 3), (4, 2))], ids=str)
def test_a_list_of_samples_with_a_shape_is_a_data_set(shapes: tuple[Any, Any]) -> None:
    """Only tensors are taken for columns, which is refused (tests/processes/test_checks.py)."""
    assert length([SimpleNamespace(shape=shape) for shape in shapes], "train_dataset") == 2

"""Which samples each rank loads.

torch's `DistributedSampler` deals single samples to ranks, so their assignment depends on the number of ranks, and
"skip the first k batches" is right only on the same number of ranks. (torch's `ElasticDistributedSampler`, too, skips
and repeats samples.) Here an epoch is first cut into steps and micro-batches, independently of the ranks (`plan`), and
each rank then takes its share of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, DistributedSampler

from .order import order_of, positions_in
from .plan import Assignment, MicroBatch, Plan
from .shuffle import shuffled
from .token_batches import TokenBatches

BLOCK = 4096
"""Positions whose samples are computed in one call, or more for a larger micro-batch. One call takes 10 us for each 64
positions, 64 single calls take 150."""


class Indices(list[int]):
    """The samples of one micro-batch and its place in the run. A data set sees a plain list."""

    def __init__(self, samples: Sequence[int] | NDArray[Any], epoch: int, micro_batch: MicroBatch) -> None:
        self.array = np.asarray(samples, dtype=np.int64)
        super().__init__(self.array.tolist())
        self.epoch, self.micro_batch = epoch, micro_batch


class ElasticSampler(DistributedSampler[Any]):
    """Divides an epoch's micro-batches among ranks. Each position of the order comes exactly once, on any number of
    ranks; in the usual order a position is a sample.

    Pass it to a `DataLoader` as ``batch_sampler``. Its only state is where the next epoch starts: from the same step
    on another number of ranks it goes on with exactly the remaining samples, without visiting the others.

    Args:
        dataset: anything with a length N. If it has `order_blocks()`, as shards have, whole blocks of it
            are shuffled, and samples among those that are read together (`Blocks`). If it is `Ordered`, its order
            defines the number of positions and the sample at each.
        global_batch: samples of one step over all ranks, G.
        micro_batch: the maximum number of samples in one batch of this loader.
        micro_batches: cut each step into this many of nearly equal size; 0: by size, the last one smaller.
            ValueError if they would have more than `micro_batch` samples.
        num_replicas: any number of ranks; default: the process group's.
        rank: default: the process group's. Ranks beyond the number of micro-batches get nothing.
        shuffle: a new order every epoch, or 0 .. N-1 every time.
        seed: the same on all ranks.
        drop_last: leave out the end of an epoch that does not fill a global batch.

    Warning:
        Call :meth:`set_epoch` before every epoch, or all epochs have the same order.

    Example:
        >>> sampler = ElasticSampler(range(10), global_batch=8, micro_batch=3, num_replicas=2, rank=0, shuffle=False)
        >>> list(sampler)
        [[0, 1, 2], [3, 4, 5], [8, 9]]
        >>> sampler.set_epoch(0, first_step=1)
        >>> list(sampler)
        [[8, 9]]
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        micro_batch: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        micro_batches: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)  # type: ignore[arg-type]
        self.order = order_of(dataset) if shuffle else None
        length = positions_in(dataset) if self.order else len(dataset)
        length -= length % global_batch if drop_last else 0
        batches = self.order if isinstance(self.order, TokenBatches) else None
        plan = Plan(length, global_batch, micro_batch, epochs=1)
        if micro_batches:
            plan = Plan.by_count(length, global_batch, micro_batches, epochs=1)
            if plan.micro_batch > micro_batch:
                cut = f"micro_batches={micro_batches} cuts {global_batch} samples into batches of {plan.micro_batch}"
                raise ValueError(f"{cut}, and micro_batch is {micro_batch}")
        self.plan = replace(plan, batches=batches)
        self.dataset_size, self.first_step = len(dataset), 0
        self.epochs = 0
        """The run's epochs: loaders stop reading ahead after the last one. 0: no limit."""
        self.per_rank: tuple[int, ...] = ()
        """The number of micro-batches of a full step that each rank computes; empty: equally many."""
        self.assignment: Assignment = "share"

    @classmethod
    def of_run(cls, plan: Plan, dataset: Sized, seed: int, ranks: int, rank: int, how: Assignment) -> ElasticSampler:
        """The sampler of a run's training data; the plan of all its epochs replaces that of a single one."""
        made = cls(dataset, plan.global_batch, plan.micro_batch, num_replicas=ranks, rank=rank, seed=seed)
        made.plan, made.epochs, made.assignment = plan, -(-plan.total_steps // plan.steps_per_epoch), how
        return made

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Set the epoch of the next iteration and the step within it to start from."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def __iter__(self) -> Iterator[Indices]:
        steps = self.steps()
        # An idle rank must not visit all steps: a stream has 2**60. The first tells, as no later step of the epoch is
        # larger, and --shares leaves no rank without work in a full one.
        if not steps or not self.micro_batches(steps.start):
            return
        mine = (micro_batch for step in steps for micro_batch in self.micro_batches(step))
        while block := list(islice(mine, max(1, BLOCK // self.plan.micro_batch))):
            positions = [np.arange(each.start, each.start + each.size, dtype=np.uint64) for each in block]
            samples = self._samples_at(np.concatenate(positions))
            for each, end in zip(block, accumulate(each.size for each in block), strict=True):
                yield Indices(samples[end - each.size : end], self.epoch, each)

    def _samples_at(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The samples at some positions of the epoch's order, shape [n]."""
        if self.order:
            return self.order.shuffled(positions, self.seed, self.epoch)
        return shuffled(positions, self.dataset_size, self.seed, self.epoch) if self.shuffle else positions

    def __len__(self) -> int:
        if not (steps := self.steps()):
            return 0
        # only an epoch's last step may be shorter; a stream has too many to visit them all
        return len(self.micro_batches(steps[0])) * (len(steps) - 1) + len(self.micro_batches(steps[-1]))

    def steps(self) -> range:
        """Global numbers of the remaining steps of the epoch."""
        first = self.epoch * self.plan.steps_per_epoch
        return range(first + self.first_step, first + self.plan.steps_per_epoch)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a global step."""
        return self.plan.micro_batches(step, self.rank, self.num_replicas, self.per_rank, self.assignment)


class Step(NamedTuple):
    """One optimizer step on one rank."""

    number: int
    """Global step, counted over all epochs."""
    micro_batches: list[MicroBatch]
    """This rank's micro-batches; an idle rank has none."""
    batches: Iterator[Any]
    """Their data in the same order, loaded on demand."""


def by_step(batches: DataLoader[Any], sampler: ElasticSampler) -> Iterator[Step]:
    """Group a loader's micro-batches by step, from the sampler's position to the end of the epoch.

    An idle rank gets each step with no micro-batches, because it takes part in the reduction.
    """
    stream = iter(batches)
    for step in sampler.steps():
        mine = sampler.micro_batches(step)
        yield Step(step, mine, (next(stream) for _ in mine))
    next(stream, None)  # lets the loader know that the epoch was read to its end

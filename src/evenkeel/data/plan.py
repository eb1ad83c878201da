"""Global batch -> micro-batches -> ranks: the arithmetic of a run.

An epoch of N samples is a sequence of positions 0 .. N-1 (`shuffle` maps a position to a sample). Step s of
an epoch has positions s*G .. s*G + G-1, the last step the rest. A step is cut into micro-batches: of a fixed size with
a smaller last one, or into a fixed number of nearly equal ones. With --batch-tokens a full step is a fixed number of
micro-batches of different sizes (`token_batches`). The number of ranks and their speeds enter only in `shares` and
`assigned`, and may differ at every step.

    >>> plan = Plan(samples=10, global_batch=8, micro_batch=3, epochs=2)
    >>> plan.total_steps, [m.size for m in plan.micro_batches(0)], [m.size for m in plan.micro_batches(1)]
    (4, [3, 3, 2], [2])
    >>> [m.size for m in Plan.by_count(samples=10, global_batch=8, micro_batches=3, epochs=2).micro_batches(0)]
    [3, 3, 2]
    >>> contiguous_part(3, index=0, parts=2), contiguous_part(3, index=1, parts=2)
    (range(0, 2), range(2, 3))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ..common.naming import in_epoch

if TYPE_CHECKING:
    from ..config import Config
    from .token_batches import TokenBatches

ENDLESS = 2**60
"""The number of samples of a stream, which has no epochs: more than any run reads."""

Assignment: TypeAlias = Literal["share", "padded", "round_robin"]
"""Which micro-batches of a step a rank computes. "share": see `shares`. "padded": the same, but a rank with one fewer
also repeats the step's first, as each pass is a collective (--shard). "round_robin": dealt in turn, padded."""


class MicroBatch(NamedTuple):
    """Consecutive positions of one epoch: the unit of work, the same on every rank."""

    step: int
    """Global step, counted over all epochs."""
    id: int
    """Number within the step, 0 .. M-1."""
    start: int
    """First position in the epoch's order."""
    size: int
    """Samples in it."""


@dataclass(frozen=True)
class Plan:
    """The cut of a run's samples into steps and micro-batches, for any number of ranks."""

    samples: int
    """Samples in an epoch, N: the positions of its order that are trained on."""
    global_batch: int
    """Samples of one optimizer step, G, summed over all ranks; with `batches` the maximum."""
    micro_batch: int
    """Samples of the largest micro-batch of a full step. In an epoch's short last step, cut by count, one may have one
    more, so that none has a single sample, with which BatchNorm fails: 5 make 3 and 2, not 2, 2 and 1."""
    epochs: int
    """Passes over the data."""
    max_steps: int = 0
    """Stop after this many steps in all; 0 means after the last epoch."""
    fixed_micro_batches: int = 0
    """M, if it is fixed, as by --micro-batches: their sizes differ by at most one. 0: cut by size. Either way
    `micro_batches_per_step` is M."""
    left_out: int = 0
    """Positions at the end of each epoch that --drop-last drops; `samples` does not include them."""
    batches: TokenBatches | None = None
    """The micro-batches of each epoch, with --batch-tokens."""

    @staticmethod
    def of(config: Config, length: int, batches: TokenBatches | None = None) -> Plan:
        """The plan of the options, of the length of an epoch's order, and of its micro-batches with --batch-tokens.

        While the cut is open, as with --micro-batch auto, a step is one micro-batch.
        """
        left_out = length % config.batch_size if config.drop_last else 0
        sizes = length - left_out, config.batch_size
        if isinstance(config.micro_batch, int) and config.micro_batch:
            plan = Plan(*sizes, config.micro_batch, config.epochs, config.max_steps)
        else:
            plan = Plan.by_count(*sizes, config.micro_batches or 1, config.epochs, config.max_steps)
        return replace(plan, left_out=left_out, batches=batches)

    @staticmethod
    def by_count(samples: int, global_batch: int, micro_batches: int, epochs: int, max_steps: int = 0) -> Plan:
        """A plan with this many micro-batches in each full step."""
        largest = -(-global_batch // micro_batches)
        return Plan(samples, global_batch, largest, epochs, max_steps, micro_batches)

    @property
    def cut(self) -> str:
        """A description of the cut, for comparison with another start's; `run.fingerprint.read_cut` reads it."""
        if self.fixed_micro_batches == 1:
            return "a whole step"
        return f"1/{self.fixed_micro_batches} of a step" if self.fixed_micro_batches else str(self.micro_batch)

    @property
    def length(self) -> int:
        """Positions in an epoch's order, including those left out."""
        return self.samples + self.left_out

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, including a shorter last one."""
        return self.batches.steps if self.batches else -(-self.samples // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run."""
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps

    @property
    def micro_batches_per_step(self) -> int:
        """M, the micro-batches of a full step: further ranks would be idle."""
        return self._count(0)

    @property
    def has_epochs(self) -> bool:
        """Whether there are epochs; a stream has none."""
        return self.samples < ENDLESS // 2

    def epoch_label(self, step: int) -> str:
        """The epoch of the last finished step, for display; empty for a stream."""
        epoch, _ = self.locate(max(0, step - 1))
        whole = self.total_steps == self.epochs * self.steps_per_epoch
        return in_epoch(epoch + 1, self.epochs if whole else None) if self.has_epochs else ""

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of a global step."""
        return divmod(step, self.steps_per_epoch)

    def step_samples(self, step: int) -> int:
        """Samples of a global step: G, or fewer at the end of an epoch."""
        start, end = self._span(step)
        return end - start

    def samples_seen(self, step: int) -> int:
        """Samples before a global step, over all epochs."""
        return step // self.steps_per_epoch * self.samples + self._span(step)[0]

    def micro_batches(
        self, step: int, rank: int = 0, world_size: int = 1, per_rank: tuple[int, ...] = (), how: Assignment = "share"
    ) -> list[MicroBatch]:
        """This rank's micro-batches of a global step, in order; an idle rank has none. `per_rank`: see `shares`."""
        (first, end), count = self._span(step), self._count(step)
        samples, largest = end - first, self.micro_batch
        ids = assigned(count, rank, world_size, per_rank, how)
        if self.batches:
            bounds = self.batches.bounds(*self.locate(step))
            return [MicroBatch(step, i, bounds[i], bounds[i + 1] - bounds[i]) for i in ids]
        if self.fixed_micro_batches:
            parts = ((i, contiguous_part(samples, i, count)) for i in ids)
            return [MicroBatch(step, i, first + part.start, len(part)) for i, part in parts]
        return [MicroBatch(step, i, first + i * largest, min(largest, samples - i * largest)) for i in ids]

    def shares(self, step: int, world_size: int, per_rank: tuple[int, ...] = ()) -> tuple[range, ...]:
        """The ids of the micro-batches of a global step, by rank; the same object for steps of the same size.

        `per_rank`: how many of a full step's micro-batches each rank computes (--shares); empty: equally many.
        """
        return shares_by_rank(self._count(step), world_size, per_rank)

    def _span(self, step: int) -> tuple[int, int]:
        """The first position of a step in its epoch, and the one after its last."""
        epoch, within = self.locate(step)
        if self.batches:
            bounds = self.batches.bounds(epoch, within)
            return bounds[0], bounds[-1]
        start = within * self.global_batch
        return start, min(start + self.global_batch, self.samples)

    def _count(self, step: int) -> int:
        """M of a step. Cut by size: as many as its samples need. Cut by count: the fixed M, also of an epoch's short
        last step, so that no rank idles; but there none has a single sample, because BatchNorm needs two."""
        if self.batches:
            return len(self.batches.bounds(*self.locate(step))) - 1
        samples = self.step_samples(step)
        if not self.fixed_micro_batches or self.micro_batch == 1:
            return -(-samples // self.micro_batch)
        if samples == self.global_batch:
            return self.fixed_micro_batches
        return min(max(1, samples // 2), self.fixed_micro_batches)


def contiguous_part(total: int, index: int, parts: int) -> range:
    """The contiguous range of ``total`` items that part number ``index`` of ``parts`` gets: samples or micro-batches.

    Sizes differ by at most one, and the larger ranges come first, so rank 0 always has work.
    """
    each, rest = divmod(total, parts)
    start = index * each + min(index, rest)
    return range(start, start + each + (index < rest))


@lru_cache(maxsize=8)
def shares_by_rank(count: int, world_size: int, per_rank: tuple[int, ...] = ()) -> tuple[range, ...]:
    """The shares of all ranks: with these sizes, if they add up to ``count``; a shorter step is divided equally."""
    if sum(per_rank) == count:
        ends = [0, *accumulate(per_rank)]
        return tuple(range(*ends[rank : rank + 2]) for rank in range(world_size))
    return tuple(contiguous_part(count, rank, world_size) for rank in range(world_size))


def assigned(count: int, rank: int, world_size: int, per_rank: tuple[int, ...], how: Assignment) -> Sequence[int]:
    """The ids of a rank's micro-batches, of ``count``."""
    if how == "share":
        return shares_by_rank(count, world_size, per_rank)[rank]
    mine = range(rank, count, world_size) if how == "round_robin" else contiguous_part(count, rank, world_size)
    most = -(-count // world_size)
    return mine if len(mine) == most else [*mine, 0]  # a rank with one less repeats the first, which counts once

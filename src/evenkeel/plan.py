"""Global batch -> micro-batches -> ranks: the arithmetic of a run, and nothing else.

An epoch of N samples is a sequence of positions 0 .. N-1 (which sample stands at a position is the
business of `order`). Step s of an epoch owns positions s*G .. (s+1)*G, the last step the shorter rest. A
step's positions are cut into micro-batches of fixed size, again with a shorter last one. None of this knows
how many ranks there are; the world size enters in one place only, `share`, and may differ at every step.

    >>> plan = Plan(samples=10, global_batch=8, micro_batch=3, epochs=2)
    >>> plan.total_steps, [m.size for m in plan.micro_batches(0)], [m.size for m in plan.micro_batches(1)]
    (4, [3, 3, 2], [2])
    >>> share(3, rank=0, world_size=2), share(3, rank=1, world_size=2)
    (range(0, 2), range(2, 3))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .config import Config


class MicroBatch(NamedTuple):
    """The unit of work: consecutive positions of one epoch, the same whoever computes them."""

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
    """How a run cuts its samples into steps and micro-batches. Holds no world size and no rank."""

    samples: int
    """Samples in an epoch, N."""
    global_batch: int
    """Samples of one optimizer step, G, summed over all ranks."""
    micro_batch: int
    """Samples that one rank computes at a time."""
    epochs: int
    """Passes over the data."""
    max_steps: int = 0
    """Stop after this many steps in all; 0 means after the last epoch."""

    @staticmethod
    def of(config: Config, samples: int) -> Plan:
        """The plan that options mean for a number of samples.

        With --micro-batch auto it has the whole batch as its micro-batch, the most that may come of it.
        """
        micro_batch = config.batch_size if config.micro_batch == "auto" else config.micro_batch
        return Plan(samples, config.batch_size, micro_batch, config.epochs, config.max_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, the shorter last one included."""
        return -(-self.samples // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run."""
        steps = self.epochs * self.steps_per_epoch
        return min(steps, self.max_steps) if self.max_steps else steps

    @property
    def max_world_size(self) -> int:
        """M, the micro-batches of a full step: more ranks than this have nothing to do."""
        return -(-min(self.global_batch, self.samples) // self.micro_batch)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of a global step."""
        return divmod(step, self.steps_per_epoch)

    def step_samples(self, step: int) -> int:
        """Samples of a global step: G, or the rest at the end of an epoch."""
        start = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.samples - start)

    def samples_seen(self, step: int) -> int:
        """Samples handed out before a global step, over all epochs."""
        epoch, within = self.locate(step)
        return epoch * self.samples + within * self.global_batch

    def micro_batches(self, step: int, rank: int = 0, world_size: int = 1) -> list[MicroBatch]:
        """The micro-batches of a global step that are this rank's, in order; none for an idle rank."""
        first = step % self.steps_per_epoch * self.global_batch
        size = self.step_samples(step)
        return [
            MicroBatch(step, i, first + i * self.micro_batch, min(self.micro_batch, size - i * self.micro_batch))
            for i in share(self._count(step), rank, world_size)
        ]

    def runs(self, step: int, world_size: int) -> tuple[range, ...]:
        """The ids of the micro-batches of a global step, by rank; the same object for steps of the same size."""
        return shares(self._count(step), world_size)

    def _count(self, step: int) -> int:
        return -(-self.step_samples(step) // self.micro_batch)


def share(count: int, rank: int, world_size: int) -> range:
    """The contiguous run of ``count`` micro-batches that is this rank's.

    Sizes differ by at most one and the larger shares come first, so that rank 0 always has work.
    """
    each, rest = divmod(count, world_size)
    start = rank * each + min(rank, rest)
    return range(start, start + each + (rank < rest))


@lru_cache(maxsize=8)
def shares(count: int, world_size: int) -> tuple[range, ...]:
    """The shares of all ranks."""
    return tuple(share(count, rank, world_size) for rank in range(world_size))


def chunks(samples: int, devices: int) -> list[int]:
    """The shares of a micro-batch that `nn.DataParallel` gives to devices, by `torch.chunk`.

    Sizes are rounded up, so that the last share may be smaller and the last devices may get none.

        >>> chunks(30, 4), chunks(10, 4), chunks(5, 4)
        ([8, 8, 8, 6], [3, 3, 3, 1], [2, 2, 1])
    """
    size = -(-samples // devices)
    return [min(size, samples - start) for start in range(0, samples, size)]


def next_smaller(micro_batch: int, batch: int) -> int:
    """The next micro-batch to try where one does not fit: a half, or a little less if that divides the batch.

    A divisor leaves no smaller rest, and so no rest of one sample, which BatchNorm could not bear.
    """
    half = max(1, micro_batch // 2)
    return next((size for size in range(half, half // 2, -1) if batch % size == 0), half)

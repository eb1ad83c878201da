"""The balance of ranks of different speed (--shares): a faster rank has a larger share of the micro-batches.

All ranks wait for the slowest in every step. Which rank computes a micro-batch changes neither samples nor random
numbers, and with --reduce tree no bit of the result; so shares may change between any two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from heapq import heapify, heapreplace

import torch
import torch.distributed as dist

from ..common.errors import Refusal
from ..config import Config, shares_of
from ..data.plan import Plan, shares_by_rank
from ..distributed.world import World
from .arrivals import BACKWARD, FORWARD, LOADING, MICRO_BATCHES, STEPS
from .task import Task

log = logging.getLogger(__name__)

EVERY = 32
"""Steps between two decisions."""
GAIN = 1.1
"""Shares change if the step takes at least this many times as long with the old ones, ..."""
TIMES = 3
"""... in this many decisions in a row: a single measurement may be chance."""
LEAST, BETTER = 2, 4
"""Below this many micro-batches per rank there is a warning; the number that it recommends."""


class Balance:
    """How many micro-batches each rank computes of a full step.

    With `auto` rank 0 decides, by the times of all ranks (`arrivals`), and broadcasts its decision.

    Args:
        config: its --shares.
        plan: a step has `plan.micro_batches_per_step` micro-batches.
        world: the ranks.
    """

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        self._count, self._world = plan.micro_batches_per_step, world
        self._auto = config.shares == "auto" and 1 < world.world_size < self._count
        self._sums = self._nothing()
        self._votes = 0
        self.per_rank = first_counts(config, plan, world.world_size)
        """By rank, as for `Plan.shares`."""
        self._warn(config, shares_of(config))

    def _warn(self, config: Config, numbers: Sequence[int]) -> None:
        ranks, typed = self._world.world_size, f"--shares {config.shares}"
        if self._world.rank or config.shares == "equal" or ranks == 1:
            return
        if numbers and len(numbers) != ranks:
            log.warning("%s: is for %d processes, but there are %d; all get equal shares", typed, len(numbers), ranks)
        elif self._count < (sum(numbers) or LEAST * ranks):
            log.warning(
                "%s: a step has %d micro-batches for %d processes, too few to divide well; start a new run with "
                "--micro-batches %d", typed, self._count, ranks, sum(numbers) or BETTER * ranks,
            )  # fmt: skip

    def _nothing(self) -> list[list[float]]:
        """For each rank: seconds, micro-batches, steps."""
        return [[0.0, 0.0, 0.0] for _ in range(self._world.world_size)]

    def take(self, rows: Sequence[Sequence[float]]) -> None:
        """On rank 0: the rows of an exchange of `Arrivals`."""
        for sums, row in zip(self._sums, rows, strict=True):
            sums[0] += row[LOADING] + row[FORWARD] + row[BACKWARD]
            sums[1] += row[MICRO_BATCHES]
            sums[2] += row[STEPS]

    def decide(self, step: int) -> bool:
        """Whether the shares change after this step. All ranks call this after each step and get the same answer."""
        if not self._auto or step % EVERY:
            return False
        decided = torch.tensor(self.wanted() if self._world.rank == 0 else self.per_rank)
        dist.broadcast(decided, src=0)  # on the CPU
        before, self.per_rank = self.per_rank, tuple(decided.tolist())
        return self.per_rank != before

    def wanted(self) -> tuple[int, ...]:
        """`per_rank` from now on, on rank 0, by the measurements since the last call."""
        measured = [(seconds / count, steps) for seconds, count, steps in self._sums if count]
        if len(measured) < len(self._sums) or min(steps for _, steps in measured) < EVERY / 4:
            return self.per_rank
        each = [seconds for seconds, _ in measured]
        best = apportioned(self._count, each)
        self._votes = self._votes + 1 if _longest(self.per_rank, each) >= GAIN * _longest(best, each) else 0
        self._sums = self._nothing()
        if self._votes < TIMES:
            return self.per_rank
        self._votes = 0
        return best


def first_counts(config: Config, plan: Plan, world_size: int) -> tuple[int, ...]:
    """Micro-batches of a full step, by rank, at first: as typed, if that is for this number of ranks; else equal."""
    count, numbers = plan.micro_batches_per_step, shares_of(config)
    if numbers and len(numbers) == world_size <= count:
        return apportioned(count, [1 / number for number in numbers])
    return tuple(map(len, shares_by_rank(count, world_size)))


def refuse_unequal(task: Task, config: Config) -> None:
    """Refuse --shares if ranks must have equally many micro-batches."""
    if task.collectives and config.shares != "equal":
        raise Refusal(
            f"--shares {config.shares}: loss() of {type(task).__name__} may call collectives, for which "
            "all ranks need equally many micro-batches; leave it out"
        )


def _longest(per_rank: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds that the slowest rank needs for its share."""
    return max(number * each for number, each in zip(per_rank, seconds, strict=True))


def apportioned(count: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """How many of ``count`` micro-batches each rank should compute, at least one, so that the last finishes soonest.

    Each further micro-batch goes to the rank that would finish it first. This is optimal: a division with an earlier
    end would give the last rank fewer and some other rank more, and that rank would end later.

    Args:
        count: at least as many as there are ranks.
        seconds: of one micro-batch on each rank.

    >>> apportioned(4, [1, 3]), apportioned(8, [1, 1, 1])
    ((3, 1), (3, 3, 2))
    """
    per_rank = [1] * len(seconds)
    # when each rank would finish one more; among equals the one with fewer, then the first
    ends = [(2 * each, 1, rank) for rank, each in enumerate(seconds)]
    heapify(ends)
    for _ in range(count - len(seconds)):
        _, size, rank = ends[0]
        per_rank[rank] = size + 1
        heapreplace(ends, ((size + 2) * seconds[rank], size + 1, rank))
    return tuple(per_rank)

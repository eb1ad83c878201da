"""When each rank is ready for the reduction of a step, and how it spent the time until then.

In a synchronous job every rank's step takes as long as the slowest one's, because all wait for each other in the
reduction. What differs is the time until a rank passes its last bucket of gradients to the reduction: before that it
does not wait for other ranks. It has three parts: waiting for data, forward and backward. (With --sync-batchnorm
forward and backward wait too, so there only the data shows which rank is late.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..data.plan import MicroBatch
from ..distributed.world import World

LOADING, FORWARD, BACKWARD, MICRO_BATCHES, SAMPLES, STEPS = range(6)
"""Columns of a row: seconds of the three parts, and the number of micro-batches, samples and steps."""

WAITING = -1
"""Waiting for other ranks; not counted."""


class Arrivals:
    """The seconds of this rank's steps, and from time to time those of all ranks. All ranks call the same methods.

    On a GPU events in the compute stream are timed, and read once they have completed: the host never waits. With
    one rank nothing is measured.

    Args:
        world: the ranks; None: nothing is measured.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = world if world and world.world_size > 1 else None
        self._gpu = self._world is not None and self._world.device.type == "cuda"
        self._row = [0.0] * 6
        self._open: deque[tuple[Sequence[MicroBatch], list[tuple[int, Any]]]] = deque()  # steps not yet added up
        self._sent: tuple[int, list[torch.Tensor], Any] | None = None

    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """A step of this rank begins."""
        if self._world:
            self._add_up()
            self._open.append((micro_batches, [(LOADING, self._now())]))

    def lap(self, part: int) -> None:
        """A part of the current step ends here."""
        if self._open:
            self._open[-1][1].append((part, self._now()))

    def exchange(self, step: int) -> tuple[int, list[list[float]]] | None:
        """Begin to send this rank's row to rank 0. Returns on rank 0 the rows of the previous exchange, with its step.

        This does not wait: the previous exchange is long over. It is one small collective on the CPU.
        """
        last = self.last()
        if self._world:
            self._add_up()
            row, rows = torch.tensor(self._row, dtype=torch.float64), list[torch.Tensor]()
            if self._world.rank == 0:
                rows = [torch.empty_like(row) for _ in range(self._world.world_size)]
            self._sent = step, rows, dist.gather(row, rows or None, async_op=True)
            self._row = [0.0] * 6
        return last

    def last(self) -> tuple[int, list[list[float]]] | None:
        """The result of the last exchange; None if it was already taken, and on other ranks."""
        sent, self._sent = self._sent, None
        if not sent:
            return None
        step, rows, work = sent
        work.wait()
        return (step, [row.tolist() for row in rows]) if rows else None

    def _now(self) -> Any:
        if not (self._world and self._gpu):
            return time.perf_counter()
        make: Any = torch.cuda.Event  # its constructor has no types
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self._world.device))
        return event

    def _add_up(self) -> None:
        """Add the steps that the device has completed to the row."""
        while self._open:
            micro_batches, marks = self._open[0]
            if self._gpu and not marks[-1][1].query():
                return
            for (_, before), (part, now) in pairwise(marks):
                if part == WAITING:
                    continue
                self._row[part] += before.elapsed_time(now) / 1e3 if self._gpu else now - before
            self._row[MICRO_BATCHES] += len(micro_batches)
            self._row[SAMPLES] += sum(each.size for each in micro_batches)
            self._row[STEPS] += 1
            self._open.popleft()

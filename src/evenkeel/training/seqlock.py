"""A sequence lock, as in the Linux kernel: tells whether a copy of the state, taken during training, is consistent.

A GPU is often a step or more behind the host, and never finishes a collective whose peer is dead. The host cannot wait
for its compute stream then. But that stream writes two numbers to the device: ``begun`` before each commit and ``done``
after it. The order of a copy (`State.begin_capture`), and what makes it safe:

1. :meth:`Seqlock.hold`: the host begins no commit. If a GPU hangs, a rescue goes on without that lock.
2. Plain data is copied, and the number of the step that the host has queued is noted.
3. :meth:`Seqlock.wait`: the devices have finished the last commit, or they hang.
4. ``done``, then all other tensors, then ``begun`` are copied, on a stream of their own (`Staging.prepare`). If the
   numbers differ and the devices seemed to hang, 3 and 4 are done again, until the deadline.
5. The lock is released. If the numbers differ, the copy is torn. If they are equal, its tensors are those of that step:
   its commit was over before the copy, and the next one had not begun after it. If the step noted in 2 is a later one,
   the plain data is newer than the tensors, and `State._check_one_step` decides whether that matters.

Forward and backward passes change nothing that is copied. So a checkpoint's thread does 3 to 5 (`Saver`) while the main
thread computes the next step; only the commit of that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..common.deadlines import FOREVER, left

COMMIT_TIMEOUT = 3.0
"""Seconds that a rescue waits for the end of the last commit before it assumes that the GPU hangs."""


class Torn(Exception):  # noqa: N818
    """There is no consistent state to save."""


class Seqlock:
    """Guards a state on one or more devices. On a CPU, which has finished when a call returns, it is a plain lock.

    Each device has its own two numbers; the state is consistent if all of them are equal.
    """

    def __init__(self, *devices: torch.device) -> None:
        self.begun, self.done = ([torch.zeros((), dtype=torch.int64, device=d) for d in devices] for _ in range(2))
        self.queued = 0
        """The last step that the host has queued on the devices."""
        self._host = threading.Lock()
        self._commit_events = {d: torch.cuda.Event() for d in devices if d.type == "cuda"}  # type: ignore[no-untyped-call]

    @contextmanager
    def change(self, step: int, undone: Tensor | None = None) -> Iterator[None]:
        """Enclose the commit of a step. A commit that raises leaves the state torn.

        Args:
            step: the number of the step.
            undone: a boolean scalar on a device; if it is true nothing changes, and the step number goes back by one.
        """
        with self._host:
            self.queued = step
            for begun in self.begun:
                begun.fill_(step)
            yield
            for begun, done in zip(self.begun, self.done, strict=True):
                if undone is not None:
                    begun.sub_(undone.to(begun.device).long())
                done.copy_(begun)
            for device, event in self._commit_events.items():
                event.record(torch.cuda.current_stream(device))

    @contextmanager
    def hold(self, until: float, final: bool = False) -> Iterator[None]:
        """Keep the host from beginning a commit; with ``final`` forever, because the process is ending.

        Raises:
            Torn: a commit was still in progress at the moment ``until``. With a GPU this does not raise: the
                host may be waiting for room in the queue of a stuck stream, and the device's numbers tell whether a
                copy is consistent.
        """
        held = self._host.acquire(timeout=left(until))
        if not held and not self._commit_events:
            raise Torn("an optimizer step is still in progress")
        try:
            yield
        finally:
            if held and not final:
                self._host.release()

    def wait(self, until: float) -> bool:
        """Wait until the devices have finished the last commit, unless they hang: at most :data:`COMMIT_TIMEOUT`, or
        without a limit if ``until`` is FOREVER. False if they have not."""
        until = until if until == FOREVER else min(until, time.monotonic() + COMMIT_TIMEOUT)
        while not (done := all(it.query() for it in self._commit_events.values())) and left(until):  # type: ignore[no-untyped-call]
            time.sleep(0.001)
        return done

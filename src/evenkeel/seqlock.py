"""Tells whether a copy of the state that was taken beside the training is whole, and of which step.

A GPU works through what it is given on its own, often a step or more behind the host, and stops for ever at a
collective whose peer is dead. Nothing can then be asked of the stream that computes. But two numbers on the device,
written by that same stream, say how far it has come: ``begun`` before each commit, ``done`` after it. A reader that
copies ``done``, then the state, then ``begun``, and finds them equal, has the whole state of that step: all of its
commit was done before, and none of the next had begun. (A sequence lock, as in the Linux kernel.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .deadline import FOREVER, left

STUCK = 3.0
"""Seconds without the end of the last commit after which a rescue takes a GPU to hang."""


class Torn(Exception):  # noqa: N818
    """There is no whole state to save."""


class Seqlock:
    """Guards a state on one device or several. On a CPU, which has done what it was told when a call returns, it is a
    lock.

    Each device has two numbers of its own. The state is whole if all of them are equal.

    Args:
        devices: where the state is; at least one.
    """

    def __init__(self, *devices: torch.device) -> None:
        self.begun, self.done = ([torch.zeros((), dtype=torch.int64, device=d) for d in devices] for _ in range(2))
        self.asked = 0
        """The last step that the host has begun to ask for."""
        self._host = threading.Lock()
        self._ends = {d: torch.cuda.Event() for d in devices if d.type == "cuda"}  # type: ignore[no-untyped-call]

    @contextmanager
    def change(self, step: int, undone: Tensor | None = None) -> Iterator[None]:
        """Around the change that makes the state that of a step. One that fails leaves it torn.

        Args:
            step: what the state's step will be.
            undone: a boolean scalar on a device; where it is true nothing changes, and the step is the one before.
        """
        with self._host:
            self.asked = step
            for begun in self.begun:
                begun.fill_(step)
            yield
            for begun, done in zip(self.begun, self.done, strict=True):
                if undone is not None:
                    begun.sub_(undone.to(begun.device).long())
                done.copy_(begun)
            for device, end in self._ends.items():
                end.record(torch.cuda.current_stream(device))

    @contextmanager
    def hold(self, until: float, final: bool = False) -> Iterator[None]:
        """Keep the host from asking for a change.

        Args:
            until: the moment to which to wait for a change in progress.
            final: afterwards as well, because the process is ending.

        Raises:
            Torn: it is still in progress. With a GPU that is no reason: the host may be waiting for room in the queue
                of a stream that is stuck, and the device's numbers tell what is whole.
        """
        held = self._host.acquire(timeout=left(until))
        if not held and not self._ends:
            raise Torn("an optimizer step is still at work")
        try:
            yield
        finally:
            if held and not final:
                self._host.release()

    def lags(self, step: int, asked: int) -> bool:
        """Whether the device is at another step than the one it was asked for."""
        return bool(self._ends) and step != asked

    def wait(self, until: float) -> None:
        """Let the devices come to the end of the last change.

        Args:
            until: the moment at which it is taken to hang, at most :data:`STUCK` from now, unless that is never.
        """
        until = until if until == FOREVER else min(until, time.monotonic() + STUCK)
        while not all(end.query() for end in self._ends.values()) and left(until):  # type: ignore[no-untyped-call]
            time.sleep(0.001)

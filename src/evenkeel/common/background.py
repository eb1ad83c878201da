"""Slow work in a thread beside the training, and deadlines for those who wait for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

FOREVER = math.inf
"""A deadline that never comes. Deadlines are times of `time.monotonic`, so that several waits can share one."""


def left(deadline: float) -> float:
    """Seconds until a deadline; 0 if it is past. No more than a lock of `threading` can wait."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


class Background(Generic[T]):
    """Runs one piece of work at a time in a thread. Its result, or error, must be taken before the next starts."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._work: Future[T] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work whose result has not been taken."""
        return self._work is not None

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self._work is not None and self._work.done()

    def start(self, work: Callable[[], T]) -> None:
        """Start a piece of work."""
        assert not self.busy
        self._work = self._thread.submit(work)

    def result(self) -> T:
        """Wait for the work; return its result or raise its error."""
        assert self._work is not None
        work, self._work = self._work, None
        return work.result()

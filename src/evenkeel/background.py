"""One piece of work at a time behind the training's back, whose failure is not lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A thread for slow work. Starting a second piece waits for the first: work must not pile up in memory."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._work: Future[T] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work that :meth:`result` has not been asked for."""
        return self._work is not None

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would answer at once."""
        return self._work is not None and self._work.done()

    def start(self, work: Callable[[], T]) -> None:
        """Begin; the result of what was before must have been taken."""
        assert not self.busy
        self._work = self._thread.submit(work)

    def result(self) -> T:
        """Wait for the work, and return or raise what came of it."""
        assert self._work is not None
        work, self._work = self._work, None
        return work.result()

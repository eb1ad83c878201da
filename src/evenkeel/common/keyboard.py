"""Ctrl-C as a flag that a loop checks.

A KeyboardInterrupt can be raised anywhere, also in a destructor or a callback that swallows it.
"""

from __future__ import annotations

import signal
import time
from typing import Any


class CtrlC:
    """A context in which Ctrl-C only sets a flag. For the main thread."""

    pressed = False

    def __enter__(self) -> CtrlC:
        self._before: Any = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def wait(self, seconds: float) -> bool:
        """Wait until Ctrl-C is pressed, at most so long; return whether it was."""
        until = time.monotonic() + seconds
        while not self.pressed and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        return self.pressed

    def _take(self, *_: object) -> None:
        self.pressed = True

"""Ctrl-C as a fact that a loop asks for.

A KeyboardInterrupt may come anywhere, and be lost in a destructor or a callback whose exceptions nobody sees.
"""

from __future__ import annotations

import os
import select
import signal
import time
from types import TracebackType
from typing import Any


class CtrlC:
    """A context in which Ctrl-C interrupts nothing and is remembered. For the main thread."""

    def __init__(self) -> None:
        self.pressed = False
        """Whether it has been."""

    def __enter__(self) -> CtrlC:
        """Take the signal."""
        self._heard, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._before: Any = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give it back."""
        signal.signal(signal.SIGINT, self._before)
        os.close(self._heard)
        os.close(self._told)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until Ctrl-C is pressed; True: it has been."""
        until = time.monotonic() + seconds
        while not self.pressed and (left := until - time.monotonic()) > 0:
            select.select([self._heard], [], [], left)
        return self.pressed

    def _take(self, *_: object) -> None:
        if not self.pressed:
            self.pressed = True
            os.write(self._told, b"!")  # wakes a wait that has just been begun

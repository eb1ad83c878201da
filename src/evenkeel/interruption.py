"""A request to stop, by signal."""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""From torchrun's agent or Docker, the keyboard, and Slurm."""

STOPPED = 75
"""Exit code of a run that stopped and can be continued (EX_TEMPFAIL in sysexits.h)."""

PATIENCE = 5.0
"""Seconds that other ranks go on after the signal, so that rank 0 can finish its step and save."""


class Stopped(Exception):  # noqa: N818
    """Leaves the training loop between two steps because a stop was asked for."""


class StopRequest:
    """Remembers that a signal came, to be looked at between two steps."""

    def __init__(self) -> None:
        self.reason = ""
        self._since = 0.0
        for number in SIGNALS:
            signal.signal(number, self._note)

    def check(self, rank: int) -> None:
        """Raise :class:`Stopped` if it is time: for rank 0 at once, since it saves; for others when it had its time."""
        if self.reason and (rank == 0 or time.monotonic() > self._since + PATIENCE):
            raise Stopped(self.reason)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.reason:
            self.reason, self._since = signal.Signals(number).name, time.monotonic()

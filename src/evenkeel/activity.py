"""What this process is doing, and what it has spent its seconds on.

One mark at each change of phase serves three readers: the ledger, which adds the seconds up, the watch for hangs, which
notices that nothing changes any more, and the display. A mark costs less than a microsecond.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .processes import stat

START_UP = "start-up"
DATA = "data loading"
COMPUTING = "forward and backward"
REDUCTION = "gradient reduction"
COMMIT = "optimizer step"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
COMPILATION = "compilation"
HANGING = "hang"

ACCOUNTS = {
    START_UP: "start_up",
    DATA: "data",
    COMPUTING: "productive",
    REDUCTION: "productive",
    COMMIT: "productive",
    CHECKPOINT: "checkpoint",
    EVALUATION: "evaluation",
    COMPILATION: "start_up",
    HANGING: "dead",
}
"""The ledger's account of each phase. Productive time is "redone" time in steps that an earlier attempt had done."""

NOTE = "evenkeel_phase"
"""The attribute of an error in which its phase is noted."""


class Activity:
    """A process's present phase, and its seconds so far. The main thread marks it; any thread may look."""

    def __init__(self) -> None:
        self.step = 0
        """Optimizer steps done."""
        self.redo_until = 0
        """The last step that an earlier attempt had done: up to there, work is done again."""
        self.phase = START_UP
        self.detail = "importing"
        """What within the phase, for a reader, where there is more to say."""
        self.changes = 0
        """Marks so far. If it stands still, so does the process."""
        self._since = time.monotonic() - _age()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, phase: str, detail: str = "") -> None:
        """Mark that another phase begins, or the next piece of the same one."""
        now = time.monotonic()
        self._seconds[self._account()] += now - self._since
        self.phase, self.detail, self._since = phase, detail, now
        self.changes += 1

    def write_off(self) -> None:
        """Count the time since the last mark as dead: it was a hang. For any thread."""
        self.phase = HANGING

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase within another."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        except Exception as error:
            self.note(error)
            raise
        finally:
            self.enter(before)

    def note(self, error: BaseException) -> None:
        """Let an error know of the present phase, which may be over by the time that somebody asks where it was."""
        if not hasattr(error, NOTE):
            with suppress(AttributeError):  # one with __slots__
                setattr(error, NOTE, self.phase)

    def phase_of(self, error: BaseException) -> str:
        """The phase in which an error came; the present one if nobody noted it."""
        return str(getattr(error, NOTE, self.phase))

    def spent(self) -> dict[str, float]:
        """Seconds by account since the process began; they add up to its age."""
        seconds = dict(self._seconds)
        account = self._account()
        seconds[account] = seconds.get(account, 0.0) + time.monotonic() - self._since
        return {name: round(value, 3) for name, value in seconds.items()}

    def seconds_in_phase(self) -> float:
        """Seconds since the last mark."""
        return time.monotonic() - self._since

    def _account(self) -> str:
        account = ACCOUNTS[self.phase]
        return "redone" if account == "productive" and self.step < self.redo_until else account


def _age() -> float:
    """Seconds since this process was started: imports are part of a start-up. 0 where there is no /proc."""
    me = stat(os.getpid())
    if me is None:
        return 0.0
    return float(Path("/proc/uptime").read_text().split()[0]) - me.started / os.sysconf("SC_CLK_TCK")


activity = Activity()
"""This process's own."""

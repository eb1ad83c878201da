"""What this process is doing, and how it has spent its time.

The main thread marks each change of phase, in less than a microsecond. The ledger adds up the seconds, the watch for
hangs notices missing marks, and the display shows the phase.
"""

from __future__ import annotations

import mmap
import os
import struct
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
VERIFICATION = "verification"
COMMIT = "optimizer step"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
REFRESH = "refresh of the data"
COMPILATION = "compilation"
HANGING = "hang"

ACCOUNTS = {
    START_UP: "start_up",
    COMPILATION: "start_up",
    DATA: "data",
    CHECKPOINT: "checkpoint",
    EVALUATION: "evaluation",
    HANGING: "dead",
}
"""The ledger's account of a phase. Others are "productive", or "redone" in a step that an earlier attempt had done."""

COMPILE_TIMEOUT = 3600
"""Seconds that a compilation may take before it counts as a hang."""


class Activity:
    """The present phase of a process, and its seconds so far. Any thread may read it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, age: float | None = None) -> None:
        """Reset the counts to the start of this process, or so many seconds ago; also for a fork, which inherits its
        parent's."""
        self.step = 0
        """Optimizer steps done."""
        self.redo_until = 0
        """The last step that an earlier attempt had done."""
        self.phase = START_UP
        self.detail = "importing"
        """The part of the phase, for the display."""
        self.marks = 0
        """Marks so far. If this does not change, the process is stuck."""
        self.patience = 0.0
        """Seconds that the phase may take without a mark, if they are more than --hang-timeout."""
        self._busy_until = mmap.mmap(-1, 8)  # shared with processes that are forked from this one
        self._since = time.monotonic() - (_age() if age is None else age)
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def enter(self, phase: str, detail: str = "", patience: float = 0.0) -> None:
        """Mark the start of a phase, or of the next part of the same one."""
        now = time.monotonic()
        self._seconds[self._account()] += now - self._since
        self.phase, self.detail, self.patience, self._since = phase, detail, patience, now
        self.marks += 1

    @contextmanager
    def during(self, phase: str, patience: float = 0.0) -> Iterator[None]:
        """A context for a phase within another one; `patience` as in :meth:`enter`."""
        before = self.phase, self.detail, self.patience
        self.enter(phase, patience=patience)
        try:
            yield
        except Exception as error:
            self.attach_phase(error)
            raise
        finally:
            self.enter(*before)

    def write_off(self) -> None:
        """Count the time since the last mark as dead, because it was a hang. For any thread."""
        self.phase = HANGING

    def attach_phase(self, error: BaseException) -> None:
        """Store the present phase in an error, for :meth:`phase_of`, unless it has an inner one."""
        if not hasattr(error, "evenkeel_phase"):
            with suppress(AttributeError):  # one with __slots__
                error.evenkeel_phase = self.phase  # type: ignore[attr-defined]

    def phase_of(self, error: BaseException) -> str:
        """The phase in which an error was raised; the present one if it was not noted."""
        return str(getattr(error, "evenkeel_phase", self.phase))

    def spent(self) -> dict[str, float]:
        """Seconds by account since the process was started."""
        seconds = defaultdict(float, self._seconds)
        seconds[self._account()] += self.seconds_in_phase()
        return {name: round(value, 3) for name, value in seconds.items()}

    def seconds_in_phase(self) -> float:
        """Seconds since the last mark."""
        return time.monotonic() - self._since

    def is_patient(self) -> bool:
        """Whether this process compiles, waits for a slow disk, or reads a stream forward; not for longer than that may
        take."""
        busy = time.monotonic() < struct.unpack("d", self._busy_until[:])[0]
        return busy or self.seconds_in_phase() < (COMPILE_TIMEOUT if self.phase == COMPILATION else self.patience)

    def declare_busy(self, seconds: float) -> None:
        """Say that this process, or the one whose loader process it is, does not hang in the next so many seconds."""
        self._busy_until[:] = struct.pack("d", time.monotonic() + seconds)

    def _account(self) -> str:
        return ACCOUNTS.get(self.phase) or ("redone" if self.step < self.redo_until else "productive")


def _age() -> float:
    """Seconds since this process was started, imports included; 0 without /proc, or with a container's own uptime."""
    if (me := stat(os.getpid())) is None:
        return 0.0
    return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - me.started / os.sysconf("SC_CLK_TCK"))


activity = Activity()
"""This process's own."""

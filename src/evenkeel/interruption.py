"""Every ending that gives notice: a thread that takes the signals, saves the last finished step, and ends the process.

A Python signal handler runs in the main thread, and that may sit in a collective that will never end because
another rank is gone. But the interpreter's own handler, in C, runs at once in whatever thread the kernel picks, and
writes the signal's number to a pipe (`signal.set_wakeup_fd`), from which one thread reads. That works whatever the
main thread does. (To block the signals and `sigwait` would not: libraries start threads when they are imported,
with nothing blocked, and a signal that reaches one of those ends the process.)

It needs nothing from other ranks: data parallelism leaves a whole copy of the state on each of them. (The idea of
saving at the last moment what survives: Gupta et al., "Just-In-Time Checkpointing", EuroSys 2024.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from . import display
from .processes import STOP_SIGNALS, die_with_parent, leave_nothing, survives_the_terminal

STOPPED = 75
"""Exit code of a run that stopped and can be continued (EX_TEMPFAIL in sysexits.h)."""

KEYBOARD = 130
"""Exit code after a second Ctrl-C, as shells have it."""

ONE_PRESS = 1.0
"""Seconds within which interrupts are one Ctrl-C: `timeout` and other wrappers deliver theirs beside the terminal's."""

AT_ONCE = 1.0
"""Seconds for the last word and for tidying up, where the process is late already."""

log = logging.getLogger(__name__)


class Interruption:
    """Watches for signals from its making to the end of the process.

    Only the main thread can make it.

    Args:
        grace: seconds from a signal to the end of this process, saved or not. torchrun kills after 30.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.reason = ""
        """Why this process is ending, if it is: a signal's name, or a hang."""
        self._rescue: Callable[[str], None] = lambda _signal: None
        self._first = threading.Lock()
        self._heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # its signals are not ours
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and _started_by_nohup():
                continue
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
        _hear_of_the_death_of_the_agent()
        threading.Thread(target=self._watch, name="interruption", daemon=True).start()

    def rescue_with(self, rescue: Callable[[str], None]) -> None:
        """Choose what to do when a signal comes; afterwards the process ends with :data:`STOPPED`.

        Args:
            rescue: is called with the signal's name, in a thread of its own.
        """
        self._rescue = rescue

    def end(self, reason: str, rescue: Callable[[], None], code: int) -> None:
        """End this process as a signal would, unless it is ending already; returns at once.

        Args:
            reason: what for.
            rescue: is called in a thread of its own, and has `grace` seconds.
            code: the exit code afterwards.
        """
        with self._first:
            if self.reason:
                return
            self.reason = reason
        threading.Thread(target=self._end, args=(rescue, code), name="rescue", daemon=True).start()
        threading.Thread(target=self._give_up, args=(code,), name="grace", daemon=True).start()

    def settle(self) -> None:
        """For the main thread after an error: if the process is ending already, leave all else to that, and do not
        return. If not, it ends for that error, and signals change nothing any more."""
        with self._first:
            if not self.reason:
                self.reason = "an error"
                return
        while True:
            with contextlib.suppress(Exception):  # torch's, of loaders that are killed meanwhile
                time.sleep(1)

    def _watch(self) -> None:
        first = 0.0
        while True:
            (number,) = os.read(self._heard, 1)
            if number not in STOP_SIGNALS:
                continue  # torch has a handler for SIGCHLD
            if first and number == signal.SIGINT and time.monotonic() - first > ONE_PRESS:
                _leave(KEYBOARD, "second Ctrl-C: exiting without saving", AT_ONCE)
            first, name = first or time.monotonic(), signal.Signals(number).name
            self.end(name, partial(self._rescue, name), STOPPED)

    def _end(self, rescue: Callable[[], None], code: int) -> None:
        try:
            rescue()
        except BaseException:
            log.exception("could not save after %s", self.reason)
        finally:
            _leave(code)

    def _give_up(self, code: int) -> None:
        time.sleep(self.grace)
        late = f"not done within --grace {self.grace:g} s of {self.reason}; `checkpoint list` shows what is saved"
        _leave(code, late, AT_ONCE)


def _leave(code: int, last_word: str = "", patience: float | None = None) -> NoReturn:
    """End the process. The main thread may never come back from where it is, so nothing can wait for it.

    Args:
        code: the exit code.
        last_word: to say on stderr, if there is anybody to hear it: the same Ctrl-C may have ended our reader.
        patience: seconds for that and for tidying up. A reader that has stopped, or a disk, may take for ever.
    """

    def tidy_up() -> None:
        with contextlib.suppress(Exception):
            display.stop()
        with contextlib.suppress(Exception):
            print(f"evenkeel: {last_word}\n" * bool(last_word), end="", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        leave_nothing()

    tidying = threading.Thread(target=tidy_up, name="last", daemon=True)
    tidying.start()
    tidying.join(patience)
    os._exit(code)


def _started_by_nohup() -> bool:
    """Under torchrun its agent counts: if that heeds SIGHUP, as it does by default, it takes its workers with it."""
    return survives_the_terminal(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())


def _hear_of_the_death_of_the_agent() -> None:
    """Have the kernel send SIGTERM when torchrun dies, which would otherwise leave its workers running for ever."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)

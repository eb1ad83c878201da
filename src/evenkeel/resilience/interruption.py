"""Stop signals: a thread receives them, saves the last finished step, and ends the process.

A Python signal handler runs in the main thread, which may sit in a collective that never ends because another rank is
gone. But the interpreter's own handler, in C, runs at once in any thread and writes the signal's number to a pipe
(`signal.set_wakeup_fd`), from which a thread of ours reads. (Blocking the signals for `sigwait` would not work:
libraries start threads when they are imported, with nothing blocked, and a signal that reaches one ends the process.)

Saving needs no other rank: in data parallelism each has a whole copy of the state. (For saving at the last moment what
survives, see Gupta et al., "Just-In-Time Checkpointing", EuroSys 2024.)
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

from ..common import display, keeper_link
from ..common.processes import STOP_SIGNALS, clean_up_before_exit, die_with_parent, handled_stop_signals, under_torchrun
from ..distributed.causes import record_lost_keeper

STOPPED = 75
"""Exit code of a run that stopped and can be continued (EX_TEMPFAIL in sysexits.h)."""

KEYBOARD = 130
"""Exit code after a second Ctrl-C, as in shells."""

REGROUPING = "the death of another rank"
"""Reason of an end that this rank's keeper requested, to fork it again."""

ORPHANED = "the death of its parent process, the keeper"
"""Reason of an end after which torchrun starts all ranks again, if it may."""

ERROR = "an error"
"""Reason of an end by an error in the main thread."""

PRESS_WINDOW = 1.0
"""Seconds within which stop signals count as one: `timeout` and others add a SIGINT to the terminal's."""

OnStop = Callable[[Callable[[], str]], None]
"""What a stop signal calls. Its argument is a function, because the reason may change meanwhile: from REGROUPING to a
stop signal."""

log = logging.getLogger(__name__)


def means_exit_now(number: int, first: float, now: float) -> bool:
    """Whether a stop signal says "exit at once, without saving", to a trainer as to its keeper: only SIGINT does, a
    second Ctrl-C. SIGTERM may be repeated, and LSF sends it after SIGINT, to a job that should save. torchrun sends it
    in place of a second Ctrl-C too, but our agent also SIGINT; a wait costs less than a lost step.
    `first`: when the first stop signal came, whichever it was; 0: none has come."""
    return bool(first) and number == signal.SIGINT and now - first > PRESS_WINDOW


class Interruption:
    """Receives the stop signals of this process from now on. Only the main thread can make it.

    Args:
        grace: seconds from a signal to the end of this process, saved or not. torchrun kills after 30.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.reason = ""
        """Why this process is ending, if it is: a signal's name, a hang, an error, or REGROUPING."""
        self._on_stop: OnStop = lambda _why: None
        self._lost_keeper = ""  # the line about its death, once it is known
        self._deciding = threading.Lock()
        self._receive_signals()

    def _receive_signals(self) -> None:
        self._pid, self._parent = os.getpid(), os.getppid()
        self._pipe, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave_to_fork)
        for number in handled_stop_signals():
            self._receive(number)
        if keeper_link.has_keeper():
            self._receive(keeper_link.REGROUP)
        if under_torchrun():
            die_with_parent(signal.SIGTERM)  # workers must not outlive a torchrun that dies
        threading.Thread(target=self._read_signals, name="interruption", daemon=True).start()

    def _receive(self, number: signal.Signals) -> None:
        signal.signal(number, self._pass_on)
        signal.siginterrupt(number, False)

    def _pass_on(self, number: int, _frame: object) -> None:
        """Write the signal to our pipe, in case other code has set a pipe of its own, such as an event loop."""
        mine = os.getpid() == self._pid  # a fork has this handler too
        if mine and signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False) != self._wakeup:
            os.write(self._wakeup, bytes([number]))

    def _leave_to_fork(self) -> None:
        """In a fork: SIGTERM ends it, as `multiprocessing` expects of its processes; other stop signals do nothing."""
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._pass_on:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_stop(self, act: OnStop) -> None:
        """Register what a thread calls before the process ends with :data:`STOPPED`."""
        self._on_stop = act

    def begin_shutdown(self, reason: str, act: Callable[[], None], code: int) -> None:
        """End this process as a signal would, unless it is ending already.

        A thread, or this one if none can be started, calls `act`, which has `grace` seconds, and exits with `code`.

            reason so far    then
            none             this is the reason, and a thread acts
            ERROR            the main thread is saving, and has `grace` seconds from now on
            REGROUPING       a stop signal becomes the reason of the same end
            another          nothing
        """
        with self._deciding:
            before = self.reason
            is_stop = code == STOPPED
            if not before or (before == REGROUPING and is_stop):
                self.reason = reason
        if before in ("", ERROR):  # main saves after an error, and so far had no limit
            with contextlib.suppress(RuntimeError):  # the system may have no more threads
                threading.Thread(target=self._exit_after_grace, args=(code,), name="grace", daemon=True).start()
        if not before:
            try:
                threading.Thread(target=self._end, args=(act, code), name="rescue", daemon=True).start()
            except RuntimeError:
                self._end(act, code)

    def claim_end_or_block(self) -> None:
        """Make an error in the main thread the reason of the end; a signal then only gives it `grace` seconds.

        If the process is ending already, wait for that, and do not return.
        """
        time.sleep(0.1)  # Slurm signals all processes of a job, and one of the task's may have died of it first
        with self._deciding:
            if not self.reason:
                self.reason = ERROR
                return
        while True:
            with contextlib.suppress(Exception):  # from torch, about loaders that are being killed
                time.sleep(1)

    def _read_signals(self) -> None:
        first = 0.0
        while True:
            (number,) = os.read(self._pipe, 1)
            if number == keeper_link.REGROUP:
                reason = REGROUPING
            elif number in STOP_SIGNALS:
                if means_exit_now(number, first, time.monotonic()):
                    _exit_now(KEYBOARD, "second stop signal: exiting without saving", timeout=1.0)
                first, reason = first or time.monotonic(), signal.Signals(number).name
                if keeper_link.has_keeper() and os.getppid() != self._parent:
                    reason = ORPHANED
                    self._lost_keeper = record_lost_keeper(os.environ.get("RANK", "0"))  # the next attempt reads it
            else:
                continue  # such as SIGCHLD, for which torch has a handler
            self.begin_shutdown(reason, partial(self._on_stop, lambda: self.reason), STOPPED)
            if number != keeper_link.REGROUP:
                keeper_link.send("stop")  # once --grace runs: this blocks if the keeper does not read

    def _end(self, act: Callable[[], None], code: int) -> None:
        try:
            act()
        except BaseException:
            log.exception("could not save after %s", self.reason)
        finally:
            speaks = self.reason == ORPHANED and os.environ.get("RANK", "0") != "0"  # rank 0 has a line of its own
            _exit_now(code, f"{self._lost_keeper}; torchrun decides" if speaks else "")

    def _exit_after_grace(self, code: int) -> None:
        time.sleep(self.grace)
        what = f"not finished within --grace {self.grace:g} s after {self.reason}"
        _exit_now(code, f"{what}; `python -m evenkeel checkpoint list` shows what is saved", timeout=1.0)


def _exit_now(code: int, last_line: str = "", timeout: float | None = None) -> NoReturn:
    """Print a last line and end the process and its loaders, without waiting for the main thread, which may be stuck.

    `timeout`: seconds for all that comes before the end, such as the output, which a stopped reader or a slow disk may
    block for ever; None: no limit.
    """

    def tidy_up() -> None:
        with contextlib.suppress(Exception):
            display.stop()
        with contextlib.suppress(Exception):  # the same Ctrl-C may have ended the reader
            print(f"evenkeel: {last_line}\n" if last_line else "", end="", file=sys.stderr)
        display.flush()
        clean_up_before_exit()

    try:
        tidying = threading.Thread(target=tidy_up, name="last", daemon=True)
        tidying.start()
        tidying.join(timeout)
    finally:
        os._exit(code)

"""Every ending that gives notice: a thread that takes the signals, saves the last finished step, and ends the process.

A Python signal handler runs in the main thread, and that may sit in a collective that will never end because
another rank is gone. So the signals are blocked everywhere and one thread waits for them (`sigwait`), which works
whatever the main thread does. It needs nothing from other ranks: data parallelism leaves a whole copy of the
state on each of them. (The idea of saving at the last moment what survives: Gupta et al., "Just-In-Time
Checkpointing", EuroSys 2024.)
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""From torchrun's agent or Docker, the keyboard, and Slurm."""

STOPPED = 75
"""Exit code of a run that stopped and can be continued (EX_TEMPFAIL in sysexits.h)."""

KEYBOARD = 130
"""Exit code after a second Ctrl-C, as shells have it."""

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""

log = logging.getLogger(__name__)


class Interruption:
    """Watches for signals from its making to the end of the process.

    Make it before any other thread exists, because a thread started earlier would not have the signals blocked.

    Args:
        grace: seconds from a signal to the end of this process, saved or not. torchrun kills after 30.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.reason = ""
        """The signal that came, if one did."""
        self._rescue: Callable[[str], None] = lambda _signal: None
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        _hear_of_the_death_of_the_agent()
        threading.Thread(target=self._watch, name="interruption", daemon=True).start()

    def rescue_with(self, rescue: Callable[[str], None]) -> None:
        """Choose what to do when a signal comes; afterwards the process ends with :data:`STOPPED`.

        Args:
            rescue: is called with the signal's name, in a thread of its own.
        """
        self._rescue = rescue

    def settle(self) -> None:
        """For the main thread after an error: if a signal has come, leave all else to it and do not return."""
        while self.reason:
            time.sleep(1)

    def _watch(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            if not self.reason:
                self.reason = signal.Signals(number).name
                threading.Thread(target=self._end, name="rescue", daemon=True).start()
            elif number == signal.SIGINT:
                print("evenkeel: second Ctrl-C: out, without saving", file=sys.stderr, flush=True)
                os._exit(KEYBOARD)

    def _end(self) -> None:
        threading.Thread(target=self._give_up, name="grace", daemon=True).start()
        try:
            self._rescue(self.reason)
        except BaseException:
            log.exception("could not save after %s", self.reason)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # the main thread may never come back from where it is, so nothing can wait for it
            os._exit(STOPPED)

    def _give_up(self) -> None:
        time.sleep(self.grace)
        print(f"evenkeel: not saved within --grace {self.grace:g} s of {self.reason}", file=sys.stderr, flush=True)
        os._exit(STOPPED)


def _hear_of_the_death_of_the_agent() -> None:
    """Have the kernel send SIGTERM when torchrun dies, which would otherwise leave its workers running for ever."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        agent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != agent:  # it died just before
            os.kill(os.getpid(), signal.SIGTERM)

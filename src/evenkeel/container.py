"""The main process of a container: checks, torchrun as a child, and an exit code that says how the job ended.

    docker run IMAGE --nproc_per_node=2 train.py --epochs 5              torchrun's own options
    docker run IMAGE launch -n 2 -g 4 -nr 0 --master HOST -- --epochs 5  those of launch/multi_node.py
    docker run IMAGE check launch -g 4 -- --epochs 5                     only refuse what would be refused

The kernel treats process 1 of a container unlike others: it gets no signal that it has not asked for, it has to bury
every process whose parent has died, and when it ends all others are killed. torchrun knows nothing of that. So it
runs as a child here, and this process passes signals on, buries, waits, and ends last.

Exit code: 0 finished, 75 stopped and can be continued, 2 refused, 137 killed, anything else is a bug
(:mod:`evenkeel.agent`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time

from . import heartbeat
from .processes import STOP_SIGNALS

HEARD = frozenset({*STOP_SIGNALS, signal.SIGQUIT, signal.SIGCHLD})
"""Signals for which this process waits. They are blocked in it, so that none can come too early."""

PR_SET_CHILD_SUBREAPER = 36
"""From <linux/prctl.h>: orphans become children of this process, as they do of process 1."""

SAVING_SECONDS = 30.0
"""How long ranks may go on that have lost torchrun: train.py's --grace is 25."""


def main(arguments: list[str]) -> int:
    """Run the job in a child, and return the container's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    if arguments in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.setsid()  # a terminal's Ctrl-C then comes once, through the parent
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        _run(arguments)
    code = tend(child)
    shutil.rmtree(heartbeat.scratch(), ignore_errors=True)  # it may be in the machine's own /dev/shm
    return code


def tend(child: int) -> int:
    """Pass signals on and bury the dead until the job is over; return its exit code."""
    from .agent import KILLED
    from .interruption import STOPPED

    asked = None
    while True:
        number = signal.Signals(signal.sigwait(HEARD))
        if number == signal.SIGCHLD:
            ended = bury()
            if child in ended:
                break
            continue
        asked = number
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number if number in STOP_SIGNALS else signal.SIGTERM)
    code = ended[child]
    if code >= 0:
        return code
    wait_for_orphans(SAVING_SECONDS)
    if asked and -code in STOP_SIGNALS:  # before torchrun listened
        print(f"evenkeel: stopped by {asked.name} before the job began", file=sys.stderr, flush=True)
        return STOPPED
    return KILLED if -code == signal.SIGKILL else 128 - code


def bury() -> dict[int, int]:
    """Exit codes of the children that have ended, by pid; negative for a signal."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def wait_for_orphans(seconds: float) -> None:
    """After the death of torchrun: let its ranks save. The kernel has told them, and has given them to this process."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        bury()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, min(left, 1.0))


def _run(arguments: list[str]) -> None:
    """The child's life: the job, or why not."""
    from .container_job import job
    from .errors import exit_code, leave

    leave(exit_code(lambda: job(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

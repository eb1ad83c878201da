"""Process 1 of a container: torchrun as a child, and an exit code that says how the job ended.

    docker run IMAGE --nproc_per_node=2 train.py --epochs 5              torchrun's own options
    docker run IMAGE launch -n 2 -g 4 -nr 0 --master HOST -- --epochs 5  the options of launch/multi_node.py

Exit code: 0 finished, 75 stopped and can be continued, 2 refused, 137 killed, 1 a FAIL of --doctor;
any other code is a bug.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

from ...common.processes import STOP_SIGNALS, adopt_orphans
from ...resilience import heartbeat

# Signals that this process waits for. They are blocked from the start, so that none is lost.
HEARD = frozenset({*STOP_SIGNALS, signal.SIGQUIT, signal.SIGCHLD})

SAVING_SECONDS = 30.0  # for ranks to save after torchrun has died; train.py's --grace is 25


def main(arguments: list[str]) -> int:
    """Run the job in a child process and return the container's exit code.

    The kernel treats process 1 differently: signals without a handler are ignored, orphans become its children, and its
    end kills everything. torchrun is not made for that (nor is tini, which does not wait for orphaned ranks).
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    if arguments in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0
    adopt_orphans()
    child = os.fork()
    if child == 0:
        os.setsid()  # so that a terminal's Ctrl-C comes once, through the parent
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        from ...distributed.exits import exit_code, leave
        from .container_job import job

        leave(exit_code(lambda: job(arguments)))
    code = tend(child)
    shutil.rmtree(heartbeat.scratch(), ignore_errors=True)  # it may be in the machine's own /dev/shm
    return code


def tend(child: int) -> int:
    """Forward signals and reap orphans until the child ends; return the job's exit code."""
    from ...resilience.interruption import STOPPED

    asked = None
    while (code := reap(child)) is None:
        number = signal.Signals(signal.sigwait(HEARD))
        if number != signal.SIGCHLD:
            asked = number
            os.kill(child, number if number in STOP_SIGNALS else signal.SIGTERM)
    if code >= 0:
        return code
    deadline = time.monotonic() + SAVING_SECONDS
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:  # the kernel has signalled torchrun's death to the ranks: they save
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.1)
    if asked and -code in STOP_SIGNALS:  # before torchrun had handlers
        print(f"evenkeel: stopped by {asked.name} before the job began", file=sys.stderr, flush=True)
        return STOPPED
    return 128 - code


def reap(child: int) -> int | None:
    """Reap all processes that have ended; the child's exit code if it is one of them, negative for a signal."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1])
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""torchrun with an exit code that says how the job ended on this node.

    python -m evenkeel.agent <options of torchrun> train.py ...

torchrun ends with 1 whatever its workers ended with, and a scheduler or a container engine must know whether to start
the job again: 0 it is finished, :data:`~evenkeel.interruption.STOPPED` it can be continued, 2 its input is refused, 137
a rank was killed too often, anything else is a bug.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .errors import REFUSED
from .interruption import STOPPED
from .network import Waiting
from .processes import REFUSAL, STOP_SIGNALS, survives_the_terminal

KILLED = 128 + signal.SIGKILL
"""Exit code for a process that was killed: by the kernel for its memory, or with its node."""


def main(arguments: list[str]) -> int:
    """Run torchrun in this process, so that signals need not be passed on."""
    heed_signals()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    typed: Any = run.parse_args(arguments)  # type: ignore[no-untyped-call]
    if typed.nnodes != "1":
        what = f"waiting for other nodes, --nnodes {typed.nnodes}, at {typed.rdzv_endpoint or typed.master_addr}"
        threading.Thread(target=_tell_of_waiting, args=(what,), name="waiting", daemon=True).start()
    try:
        run.main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        return verdict([failure.exitcode for failure in error.failures.values()])
    except SignalException as ended:
        # the workers were sent SIGTERM, and had their grace
        return REFUSED if ended.args == (REFUSAL.name,) else STOPPED
    return 0


def heed_signals() -> None:
    """From here on a stop signal ends this process with :data:`~evenkeel.interruption.STOPPED`.

    torchrun has handlers of its own, but not before it has workers, and in torch 2.8 none for USR1 and USR2. What is
    raised here on its way out has it stop the workers as its own handlers would.
    """

    def stop(_number: int, _frame: object) -> None:
        raise SystemExit(STOPPED)

    for number in STOP_SIGNALS:
        if not (number == signal.SIGHUP and survives_the_terminal(os.getpid())):
            signal.signal(number, stop)
    signal.signal(REFUSAL, _refuse)


def _refuse(_number: int, _frame: object) -> None:
    """A rank has said why. Only torchrun's own exception leaves the rendezvous open, for nodes that may do without."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    logging.disable(logging.WARNING)  # torchrun would name the signal and every worker
    raise SignalException(REFUSAL.name, signal.SIGTERM)


def _tell_of_waiting(what: str) -> None:
    """torchrun says nothing while it waits for other nodes, at the start or after a loss. It has no workers then."""
    children, waiting = Path(f"/proc/self/task/{os.getpid()}/children"), Waiting()
    with contextlib.suppress(OSError):  # not every kernel lists them
        while True:
            if children.read_text():
                waiting = Waiting()
            waiting.tell(lambda: what)
            time.sleep(0.5)


def verdict(codes: Collection[int]) -> int:
    """One exit code for a node from those of its ranks, where none was asked to stop.

    A rank that is stopped by torchrun because another one has failed ends with :data:`STOPPED` too, and one that has
    lost its peer with 1. So what says most comes first.

    Args:
        codes: exit codes as `subprocess` has them, negative for a signal.
    """
    if REFUSED in codes:
        return REFUSED
    if -signal.SIGKILL in codes:
        return KILLED
    crashes = [code for code in codes if code not in (STOPPED, -signal.SIGTERM)]
    code = min(crashes, default=STOPPED)  # a signal, if there was one
    return 128 - code if code < 0 else code


def first_error(folders: Iterable[Path]) -> str:
    """The traceback of the rank that failed first, from the error files that torchrun's --log-dir collects.

    By the time of the file, because the one in it is in whole seconds, within which all peers fail as well.

    Args:
        folders: those of all nodes.
    """
    files = [path for folder in folders for path in folder.rglob("error.json")]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        try:
            message: Any = json.loads(path.read_text())["message"]
            return str(message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half-written, by a rank that was killed
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

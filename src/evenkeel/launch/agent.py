"""torchrun with an exit code that says how the job ended on this node.

    python -m evenkeel.launch.agent <options of torchrun> train.py ...

torchrun itself exits with 1 whatever happened. A scheduler or container engine must know whether to start the job
again: 0 finished, 75 (:data:`~evenkeel.resilience.interruption.STOPPED`) stopped and can be continued, also by the loss
of node 0 or because too few nodes have come, 2 refused, or the same error twice in a row, 137 a rank was
killed too often; any other code is a bug.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from ..common.arguments import some_options
from ..common.display import say_stopped_at_start
from ..common.errors import REFUSED, Refusal
from ..common.network import Unanswered, Waiting, meet
from ..common.processes import AGENT_SIGNALS, FAILURE, REFUSAL, STOP_SIGNALS, ranks_of, survives_the_terminal
from ..distributed.attempt_files import said_first
from ..resilience import heartbeat
from ..resilience.interruption import STOPPED, means_exit_now
from ..run.records import read_config
from .topology import JOIN_SECONDS, parse_master

KILLED = 128 + signal.SIGKILL  # exit code after a kill by the kernel (out of memory) or together with the node


def main(arguments: list[str], lost: int = STOPPED, again: int = REFUSED) -> int:
    """Run torchrun in this process, so that no signals need to be forwarded. `lost`, `again`: the code where node 0 is
    lost, and after the same error twice."""
    names = ",".join(number.name for number in heed_signals())
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", names)  # for --signals-to-handle; not in torch 2.8
    # the ranks and `causes` say what torch's C++ code and torchrun would add to every end
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed import run

    for name in ("multiprocessing.api", "multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    # its only warnings are about stop signals
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)

    typed: Any = run.parse_args(arguments)  # type: ignore[no-untyped-call]
    with _mirrored(typed) as mirror:
        mirror.code = mirror.code or _run(arguments, typed, mirror.fetching, lost, again)
        mirror.finished = mirror.code == 0
        return int(mirror.code)


def _mirrored(typed: Any) -> AbstractContextManager[Any]:
    """Where --mirror is given, the process that copies checkpoints (mirror/attach.py), unless that has been deleted."""
    words = [word.replace("$$", "$") for word in typed.training_script_args]  # as torchrun's templates do
    with contextlib.suppress(ModuleNotFoundError):
        if mirror_in(words):
            attach = importlib.import_module("..mirror.attach", __package__)
            hosts = _meeting(typed).get("is_host")
            first = hosts != "0" if hosts else typed.node_rank == 0
            return attach.mirrored(words, first, alone=typed.nnodes == "1")  # type: ignore[no-any-return]
    return contextlib.nullcontext(SimpleNamespace(code=0, fetching=None))


def mirror_in(words: Sequence[str]) -> bool:
    """Whether options of train.py have --mirror, also in the file of --config: this node then fetches first."""
    with contextlib.suppress(Refusal):  # it is for the ranks to print
        early, _ = some_options(words, ("--mirror",), ("--config",))
        return bool(early.mirror or (early.config and read_config(Path(early.config)).get("mirror")))
    return False


def _meeting(typed: Any) -> dict[str, str]:
    return dict(word.split("=", 1) for word in typed.rdzv_conf.split(",") if "=" in word)


def _met(arguments: list[str], typed: Any, fetching: float) -> list[str]:
    """On other nodes wait for node 0, which has fetched at the same time; return torchrun's arguments with the same
    patience: --join-timeout, and as long as this node was `fetching`, in seconds.

    With less, two nodes that give up and are started again at different times might miss each other for ever: each
    would fetch while the other waits.
    """
    meeting = _meeting(typed)
    join = meeting.get("join_timeout", str(JOIN_SECONDS))
    patience = int(join) + math.ceil(fetching)
    heartbeat.renew(fetching)
    if meeting.get("is_host") == "0":
        meet(*parse_master(typed.rdzv_endpoint), is_master=False, patience=patience)
        heartbeat.renew(fetching)
    longer = typed.rdzv_conf.replace(f"join_timeout={join}", f"join_timeout={patience}")
    return [longer if word == typed.rdzv_conf else word for word in arguments]


def _run(arguments: list[str], typed: Any, fetching: float | None, lost: int, again: int) -> int:
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import api as rendezvous

    gone = (rendezvous.RendezvousConnectionError, rendezvous.RendezvousTimeoutError, rendezvous.RendezvousClosedError)
    try:
        if fetching is not None:
            arguments = _met(arguments, typed, fetching)
        if typed.nnodes != "1":
            what = f"waiting for other nodes, --nnodes {typed.nnodes}, at {typed.rdzv_endpoint or typed.master_addr}"
            threading.Thread(target=_report_waiting, args=(what,), name="waiting", daemon=True).start()
        run.main(arguments)
    except ChildFailedError as error:
        (line, *_) = [*causes(error.failures.values()), str(error)]
        print(line, file=sys.stderr, flush=True)
        return verdict([failure.exitcode for failure in error.failures.values()])
    except SignalException as ended:  # the workers got the signal, and time to save
        code = {(REFUSAL.name,): REFUSED, (FAILURE.name,): again}.get(ended.args, STOPPED)
        if code == STOPPED and typed.nnodes != "1":  # rank 0 has said so, perhaps on another node
            print(f"evenkeel: this node was stopped by {ended.sigval.name}", file=sys.stderr, flush=True)
        return code
    except (*gone, DistError, Unanswered) as error:  # torchrun has stopped the workers, which have saved
        late = isinstance(error, rendezvous.RendezvousTimeoutError)
        what = "too few nodes came in time (--join-timeout)" if late else "node 0 is lost, or too few nodes have come"
        reason = str(error).partition("\n")[0] or type(error).__name__
        print(f"evenkeel: {what}: {reason}", file=sys.stderr, flush=True)
        return lost
    return 0


def causes(failures: Iterable[Any]) -> list[str]:
    """Why a job failed on this node, in a line for each reason: the error of the first rank to fail, and signals."""
    files = [failure.error_file for failure in failures if Path(failure.error_file).is_file()]
    said = [*filter(None, map(said_first, files)), *(it.message for it in failures if it.exitcode < 0)]
    return [f"evenkeel: the job has failed: {line}" for line in said]


def heed_signals() -> list[signal.Signals]:
    """Make stop signals end this process with exit code 75; returns them.

    torchrun installs its own handlers only once it has workers, and torch 2.8 none for USR1 and USR2. For these our
    handler calls torchrun's for SIGTERM, which passes them to the workers.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not stop and callable(handler):
            handler(number, frame)
        say_stopped_at_start(number)
        raise SystemExit(STOPPED)

    nohup = survives_the_terminal(os.getpid())
    signals = [number for number in AGENT_SIGNALS if not (nohup and number == signal.SIGHUP)]
    for number in signals:
        signal.signal(number, stop)
    for number in (REFUSAL, FAILURE):
        signal.signal(number, _refuse)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # with --mirror its own, and then a rank saves
    threading.Thread(target=_pass_on_ctrl_c, args=(read,), name="ctrl-c", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AGENT_SIGNALS)  # a launcher blocks two before it becomes this program
    return signals


def _pass_on_ctrl_c(signals: int) -> None:
    """Send a second Ctrl-C to the ranks as one: torchrun sends SIGTERM, which ends no save (`means_exit_now`)."""
    first = 0.0
    while True:
        (number,) = os.read(signals, 1)
        if means_exit_now(number, first, time.monotonic()):
            for rank in ranks_of(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(rank, signal.SIGINT)
        if not first and number in STOP_SIGNALS:
            first = time.monotonic()


def _refuse(number: int, _frame: object) -> None:
    """After a rank has printed why a restart is useless: raise torchrun's own exception, which leaves the rendezvous
    open."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    logging.disable(logging.WARNING)  # torchrun would list the signal and every worker
    raise SignalException(signal.Signals(number).name, signal.SIGTERM)


def _report_waiting(what: str) -> None:
    """Print `what` while torchrun waits silently for other nodes: it has no workers then."""
    children, waiting = Path(f"/proc/self/task/{os.getpid()}/children"), Waiting()
    with contextlib.suppress(OSError):  # not every kernel lists them
        others = {*children.read_text().split()}  # such as the process of --mirror
        while True:
            if {*children.read_text().split()} - others:
                waiting = Waiting()
            waiting.say(lambda: what)
            time.sleep(0.5)


def verdict(codes: Collection[int]) -> int:
    """One exit code for a node from those of its ranks (negative for a signal), if there was no stop signal.

    After a failure torchrun stops the other ranks, which then exit with 75, or with 1 because they lost a peer. So the
    most specific code wins.
    """
    if REFUSED in codes:
        return REFUSED
    if -signal.SIGKILL in codes:
        return KILLED
    crashes = [code for code in codes if code not in (STOPPED, -signal.SIGTERM)]
    code = min(crashes, default=STOPPED)  # a signal, if there was one
    return 128 - code if code < 0 else code


def first_error(folders: Iterable[Path]) -> str:
    """The traceback of the rank that failed first, from the error files below torchrun's --log-dir of each node.

    Ordered by file time, because the time inside is in whole seconds, and all peers fail within one.
    """
    files = [path for folder in folders for path in folder.rglob("error.json")]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        try:
            message: Any = json.loads(path.read_text())["message"]
            known = message["extraInfo"] if isinstance(message, dict) else {"traceback": message}
            return str(known.get("traceback", known.get("py_callstack", "")))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half-written by a rank that was killed
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

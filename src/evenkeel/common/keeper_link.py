"""A rank's link to its keeper (resilience/keeper.py): messages, and what it knows of it. No effect without one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

from .naming import Kind

Message = Literal[Kind, "generation", "limit", "grace", "first_step", "lost", "hang", "refusal", "give_up", "stop"]
"""What a rank tells its keeper, mostly with a value:

    generation  the name by which all ranks of this generation meet
    limit       --keeper-restarts
    grace       --grace
    first_step  that this attempt has finished
    checkpoint  the label of a state in memory (`resilience.memory_checkpoint`)
    snapshot    the same of a rescue
    lost        it has probably lost another rank; the traceback to print if no keeper confirms that
    hang        it ends because of a hang; which ranks hung
    refusal     it refuses its input; the line
    give_up     it would fail again, and should not be started again (`distributed.exits`)
    stop        it has received a stop signal
"""

REGROUP = signal.SIGVTALRM
"""From a keeper to its rank: another rank has died. Save the last finished step and leave, to be forked again. It is a
signal that ends a process which does not handle it yet, and that nothing else sends."""

STORE = "EVENKEEL_KEPT_STORE"
"""The environment variable that says, on rank 0's node, that the job's store is in a process beside the keeper."""

LAST_END = "EVENKEEL_LAST_END"
"""The environment variable that tells a rank which a keeper has forked again how the last attempt ended."""

for _foreign in (STORE, LAST_END):  # a rank of another job may have started this process
    os.environ.pop(_foreign, None)


class _Keeper(NamedTuple):
    pipe: int
    launcher: int
    restarts: int


_keeper: _Keeper | None = None
_sent: set[Message] = set()
_last_act: Callable[[], object] | None = None
_sending = threading.Lock()  # a pipe does not mix long messages if only one thread writes
_why_absent = ""


def open_link(pipe: int, launcher: int, restarts: int) -> None:
    """Note that this process is a fork of a keeper.

    Args:
        pipe: file descriptor to write to.
        launcher: pid of what started the keeper.
        restarts: how often this keeper has forked before.
    """
    global _keeper
    _keeper = _Keeper(pipe, launcher, restarts)


def has_keeper() -> bool:
    """Whether a keeper forked this process."""
    return _keeper is not None


def note_absence(reason: str) -> None:
    """Note, for the log, why there is no keeper although one was wanted."""
    global _why_absent
    _why_absent = reason


def why_absent() -> str:
    """Why there is no keeper although one was wanted; "" if there is one, or none was wanted."""
    return _why_absent


def restarts() -> int:
    """How often the keeper has forked this rank again."""
    return _keeper.restarts if _keeper else 0


def starter() -> int:
    """The pid of what started this rank, usually torchrun's agent; a keeper between them does not count."""
    return _keeper.launcher if _keeper else os.getppid()


def has_sent(message: Message) -> bool:
    """Whether this rank has sent such a message, or would have if it had a keeper."""
    return message in _sent


def before_exit(act: Callable[[], object]) -> None:
    """Register what this rank does last before it ends, unless it is killed."""
    global _last_act
    _last_act = act


def run_before_exit() -> None:
    """Run what `before_exit` has registered."""
    if _last_act:
        _last_act()


def send(message: Message, value: str = "") -> None:
    """Send a message to the keeper, if there is one. It reads all that was sent before this process ended."""
    _sent.add(message)
    if _keeper:
        with contextlib.suppress(OSError), _sending:  # the keeper is dead, and this process ends soon
            left = f"{message} {value}\n".encode(errors="surrogateescape")
            while left:  # a signal may cut a write short
                left = left[os.write(_keeper.pipe, left) :]

"""What a rank knows of the keeper above it (resilience/keeper.py), and tells it through a pipe.

A rank is *kept* if it was forked by a keeper. Without one, nothing below has an effect.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

Word = Literal["generation", "limit", "grace", "progress", "held", "lost", "hang", "refusal"]
"""What a rank can tell: under which name all ranks of this generation meet; how often it may be forked again; --grace;
the first step that it has finished; what it has left in memory (`resilience.held`); it ends because it has lost another
rank (with what to print if that is not so), or because of a hang, or because it refuses its input."""

REGROUP = signal.SIGVTALRM
"""From a keeper to its rank: another rank has died. Save the last finished step and leave, to be forked again. It is a
signal that ends a process which does not handle it yet, and that nothing else sends."""

STORE = "EVENKEEL_KEPT_STORE"
"""The environment variable that says, on rank 0's node, that the job's store is in a process beside the keeper."""


class _Keeper(NamedTuple):
    pipe: int
    launcher: int
    restarts: int


_keeper: _Keeper | None = None
_lost = False
_last_act: Callable[[], object] | None = None
_telling = threading.Lock()  # a pipe keeps longer words in one piece from one thread only
_why_not = ""


def enter(pipe: int, launcher: int, restarts: int) -> None:
    """Become a kept rank.

    Args:
        pipe: file descriptor to write to.
        launcher: pid of what started the keeper.
        restarts: how often this keeper has forked before.
    """
    global _keeper
    _keeper = _Keeper(pipe, launcher, restarts)


def is_kept() -> bool:
    """Whether a keeper forked this process."""
    return _keeper is not None


def do_without(reason: str) -> None:
    """Note why there is no keeper although one was wanted, for the log."""
    global _why_not
    _why_not = reason


def why_not() -> str:
    """Why there is no keeper although one was wanted; "" if there is one, or none was."""
    return _why_not


def restarts() -> int:
    """How often the keeper has forked this rank again."""
    return _keeper.restarts if _keeper else 0


def launcher() -> int:
    """The pid of what started this rank, as a rule torchrun's agent; the keeper between them does not count."""
    return _keeper.launcher if _keeper else os.getppid()


def is_followed() -> bool:
    """Whether this rank has told that it ends because it has lost another, after which it is as a rule forked again."""
    return _lost


def at_the_end(act: Callable[[], object]) -> None:
    """Do this last of all before this rank ends, unless it is killed."""
    global _last_act
    _last_act = act


def end() -> None:
    """Do what was to be done last."""
    if _last_act:
        _last_act()


def tell(word: Word, value: str = "") -> None:
    """Tell the keeper, if there is one. It hears all that was written before this process ends, however it ends."""
    global _lost
    if _keeper:
        _lost = _lost or word == "lost"
        with contextlib.suppress(OSError), _telling:  # it is dead, and this process ends soon
            os.write(_keeper.pipe, f"{word} {value}\n".encode(errors="surrogateescape"))

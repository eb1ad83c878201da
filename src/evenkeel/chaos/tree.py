"""The process tree of a job, as Linux shows it in /proc: its agents, its ranks, what it leaves.

Only descendants are ever looked at. Chaos makes itself their subreaper, so that a process whose parent has died
stays a descendant instead of going to pid 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from ..processes import Stat, stat

PR_SET_CHILD_SUBREAPER = 36
"""From <linux/prctl.h>."""


class Worker(NamedTuple):
    """A rank of the job."""

    rank: int
    pid: int
    agent: int
    """Pid of the torchrun that started it."""


def adopt_orphans() -> None:
    """From now on processes below this one become its children when their own parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(*roots: int) -> dict[int, Stat]:
    """Pid -> status of all that live below some processes, those themselves left out."""
    everybody = {int(path.name): stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    table = {pid: status for pid, status in everybody.items() if status}  # the others have ended meanwhile
    found: dict[int, Stat] = {}
    newest = set(roots)
    while newest:
        below = {pid: status for pid, status in table.items() if status.parent in newest and pid not in found}
        found |= below
        newest = set(below)
    return {pid: status for pid, status in found.items() if status.state != "Z"}


def workers(*roots: int) -> list[Worker]:
    """The ranks below some processes, in order. Their own children, such as data loaders, are not ranks."""
    below = descendants(*roots)
    ranks = {pid: rank for pid in below if (rank := rank_of(pid)) is not None}
    found = [Worker(rank, pid, below[pid].parent) for pid, rank in ranks.items() if below[pid].parent not in ranks]
    return sorted(found)


def rank_of(pid: int) -> int | None:
    """RANK in the environment that torchrun gave a process, which its children inherit; None for others."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    # RANK alone may also be set around torchrun, by a cluster that numbers its nodes with it
    given = {name: value for name, _, value in (variable.partition(b"=") for variable in variables)}
    return int(given[b"RANK"]) if b"TORCHELASTIC_RUN_ID" in given and b"RANK" in given else None


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_descendants(patience: float = 10) -> None:
    """SIGKILL everything below this process until nothing is left, or so many seconds have passed."""
    deadline = time.monotonic() + patience
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)

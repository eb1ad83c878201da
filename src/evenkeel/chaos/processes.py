"""The processes of a job, as Linux shows them in /proc: its agents, its ranks, what it leaves.

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

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from <linux/prctl.h>

_libc = ctypes.CDLL(None)


class Process(NamedTuple):
    """A line of the process table."""

    pid: int
    parent: int
    state: str
    """R, S, D: alive; T: stopped by SIGSTOP; Z: dead, but its parent has not asked yet."""


class Worker(NamedTuple):
    """A rank of the job."""

    rank: int
    pid: int
    agent: int
    """Pid of the torchrun that started it."""


def adopt_orphans() -> None:
    """From now on processes below this one become its children when their own parent dies."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """In a new child: have the kernel send SIGTERM when its parent dies, even by SIGKILL."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def descendants(*roots: int) -> dict[int, Process]:
    """Pid -> process for all that live below some processes, those themselves left out."""
    table = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            table.append(Process(int(stat.parent.name), int(parent), state))
    found: dict[int, Process] = {}
    newest = set(roots)
    while newest:
        below = [process for process in table if process.parent in newest and process.pid not in found]
        found |= {process.pid: process for process in below}
        newest = {process.pid for process in below}
    return {pid: process for pid, process in found.items() if process.state != "Z"}


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

"""What one process must know of another on the same machine."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .deadline import left

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""From torchrun's agent or Docker, the keyboard, Slurm (two), and a terminal that is closed."""

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


@dataclass(frozen=True)
class Stat:
    """What the kernel says of a process (proc_pid_stat(5))."""

    state: str
    """R running, S sleeping, T stopped, Z dead and not yet buried, ..."""
    parent: int
    started: int
    """Clock ticks from the machine's boot to its start; with the pid it names a process once and for all."""


def stat(pid: int) -> Stat | None:
    """A process's status; None if there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent dies, however that dies. Linux only."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died just before
        os.kill(os.getpid(), number)


def leave_nothing(seconds: float = 1.0) -> None:
    """End the children that this process has by `multiprocessing`, and leave no folder in the temporary directory.

    For who ends by `os._exit`, and so without what `multiprocessing` does `atexit`. Takes some milliseconds. Of
    torchrun's folders those go that are empty: it makes one for the traceback of each rank, and leaves them all.

    Args:
        seconds: to wait for the ends, at most.
    """
    children, until = multiprocessing.active_children(), time.monotonic() + seconds
    for child in children:
        child.kill()
    for child in children:
        child.join(left(until))  # or it might put something into the folder yet
    if folder := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)
    logs = [*Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents][:4]  # of rank, attempt, job and agent
    if len(logs) == 4 and logs[-1].name.startswith("torchelastic_"):  # not those of a --log-dir
        with contextlib.suppress(OSError):  # there is a traceback in it, or another rank has not left yet
            for path in logs:
                path.rmdir()


def survives_the_terminal(pid: int) -> bool:
    """Whether a process ignores SIGHUP, as `nohup` has it. Linux only."""
    try:
        (ignored,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return False
    return bool(int(ignored, 16) >> (signal.SIGHUP - 1) & 1)


def count_cores() -> int:
    """Return how many cores this process may use: its affinity, and in a container the quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores

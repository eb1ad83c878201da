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

REFUSAL = signal.SIGALRM
"""From a rank to its agent: the job's input is refused, and another start would not change that."""

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
    return _in_mask(pid, "SigIgn", signal.SIGHUP)


def _in_mask(pid: int, mask: str, number: signal.Signals) -> bool:
    """Whether a signal is in one of the masks of proc_pid_status(5)."""
    try:
        (bits,) = re.findall(rf"^{mask}:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return False
    return bool(int(bits, 16) >> (number - 1) & 1)


def torchrun_agent() -> int | None:
    """The pid of the torchrun that has started this process; None if another has, or where that cannot be known.

    `torch.distributed.run` names its thread so. A shell between the two, or a launcher of somebody's own, does not.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if "TORCHELASTIC_RUN_ID" in os.environ and Path(f"/proc/{parent}/comm").read_text() == "pt_elastic\n":
            return parent
    return None


def can_lose_a_node(agent: int) -> bool:
    """Whether the job of this torchrun goes on without its node: one of our launchers', or --nnodes MIN:MAX."""
    typed = f"--nnodes={os.environ.get('PET_NNODES', '')}\0"
    with contextlib.suppress(OSError):
        typed += Path(f"/proc/{agent}/cmdline").read_text()
    return "EVENKEEL_LARGEST_WORLD" in os.environ or bool(re.search(r"--nnodes[=\0](\d+):(?!\1\0)", typed))


def end_agent(agent: int) -> None:
    """Have torchrun end without starting its workers again, and return when it has, or would not, in a few seconds.

    By a signal that it does not handle: to those that it does it answers with a traceback. Two need that: process 1 of
    a container, which no other signal ends, and one with --redirects or --tee, to show what it has not shown yet.
    """
    with contextlib.suppress(OSError):  # it has just ended
        children = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
        workers = [child for child in children if child != os.getpid() and _is_of_torchrun(child)]
        shown = os.path.samestat(Path(f"/proc/{agent}/fd/2").stat(), os.fstat(2))
        quiet = (shown and agent != 1) or _in_mask(agent, "SigCgt", REFUSAL)  # evenkeel.agent does handle it
        if os.getppid() != agent:
            return  # while other nodes were waited for; its number may be another process's by now
        os.kill(agent, REFUSAL if quiet else signal.SIGTERM)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):  # one that ends by itself must not spare the others
                os.kill(worker, signal.SIGTERM)
    orphaned_within(5, agent)


def _is_of_torchrun(pid: int) -> bool:
    """Whether a child of torchrun's is a rank. A shell may have started others before it became torchrun by `exec`."""
    with contextlib.suppress(OSError):
        return b"\0TORCHELASTIC_RUN_ID=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


def orphaned_within(seconds: float, parent: int) -> bool:
    """Wait so long for the parent's death; whether it has come."""
    deadline = time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.getppid() != parent


def count_cores() -> int:
    """Return how many cores this process may use: its affinity, and in a container the quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores

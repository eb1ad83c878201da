"""Other processes of this machine: their state, signals, torchrun's agent, and children to end at exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from .. import STARTED
from . import keeper_link

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""From torchrun's agent or Docker, the keyboard, Slurm (two), and a terminal that is closed."""

AGENT_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
"""Signals that torchrun should pass on to its ranks."""

_workers: list[BaseProcess] = []  # of all loaders

REFUSAL = signal.SIGALRM
"""From a rank to its agent: the input is refused, and a restart would not change that."""

FAILURE = signal.SIGPROF
"""The same to an agent of ours: the rank has failed by the same error as before."""


class Stat(NamedTuple):
    """A process as the kernel describes it; see proc_pid_stat(5)."""

    state: str
    """R running, S sleeping, T stopped, Z a zombie, ..."""
    parent: int
    started: int
    """Clock ticks between the machine's boot and its start. Together with the pid this identifies a process."""


def stat(pid: int) -> Stat | None:
    """The status of a process; None if there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def descendants(*roots: int) -> dict[int, Stat]:
    """Pid -> status of all living processes below some others."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    table = {pid: status for pid in pids if (status := stat(pid))}
    found: dict[int, Stat] = {}
    newest = set(roots)
    while newest:
        newest = {pid for pid, status in table.items() if status.parent in newest and pid not in found}
        found |= {pid: table[pid] for pid in newest}
    return {pid: status for pid, status in found.items() if status.state != "Z"}


def die_with_parent(number: signal.Signals, parent: int = 0) -> None:
    """Have the kernel send this process a signal when its parent dies, however it dies. Linux only.

    `parent`: its pid, from before it may have died; 0: that of this process's start, or the present one in a fork.
    """
    if sys.platform != "linux":
        return
    parent = parent or (STARTED[1] if os.getpid() == STARTED[0] else os.getppid())
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG in <linux/prctl.h>
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), number)


def start_in_session(
    command: Sequence[str], death: signal.Signals = signal.SIGTERM, **options: Any
) -> subprocess.Popen[Any]:
    """Start a child in a session of its own, which no Ctrl-C reaches, and which gets a signal if this process dies.

    A Ctrl-C that comes meanwhile is raised afterwards, and the child ended: in the handlers that Python calls around a
    fork (`os.register_at_fork`) it would be printed and ignored. Takes the options of `subprocess.Popen`.
    """
    before, parent = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), os.getpid()

    def begin() -> None:
        die_with_parent(death, parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    process = None
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=begin, **options)
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except KeyboardInterrupt:
            if process:
                process.send_signal(death)
            raise
    return process


def name_process(name: str) -> None:
    """Give this process a name for `ps -o comm` and `top`, of 15 letters at most. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def process_name(pid: int) -> str:
    """The name by :func:`name_process`, else the program's; "" if there is no such process, or no /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent dies. Linux only."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER in <linux/prctl.h>


def clean_up_before_exit(seconds: float = 1.0) -> None:
    """Kill the `multiprocessing` children of this process, wait for them, and delete its temporary folders.

    For a process that ends by `os._exit`, which skips the exit handlers of `multiprocessing`. Also saves an orphan's
    state (`keeper_link.run_before_exit`), and deletes empty folders that torchrun has made for tracebacks.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error about each loader process
    children, until = multiprocessing.active_children(), time.monotonic() + seconds
    for child in children:
        child.kill()
    for child in children:
        child.join(max(0.0, until - time.monotonic()))  # or it might still write into the folder
    if folder := multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        shutil.rmtree(folder, ignore_errors=True)
    keeper_link.run_before_exit()
    logs = [*Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents][:4]  # of rank, attempt, job and agent
    made = len(logs) == 4 and logs[-1].name.startswith("torchelastic_")  # not the folders of a --log-dir
    if made and not keeper_link.has_keeper():
        with contextlib.suppress(OSError):  # there is a traceback in it, or another rank has not left yet
            for path in logs:
                path.rmdir()


def signal_name(number: int) -> str:
    """Such as SIGTERM; "signal 34" for a real-time one."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def under_torchrun() -> bool:
    """Whether torchrun has started this process, or its keeper."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def handled_stop_signals() -> list[signal.Signals]:
    """The stop signals that a rank heeds: all, but under `nohup` not SIGHUP, after which torchrun ends it anyway."""
    nohup = survives_the_terminal(keeper_link.starter() if under_torchrun() else os.getpid())
    return [number for number in STOP_SIGNALS if not (nohup and number == signal.SIGHUP)]


def survives_the_terminal(pid: int) -> bool:
    """Whether a process ignores SIGHUP, as under `nohup`. Linux only."""
    return _in_mask(pid, "SigIgn", signal.SIGHUP)


def _in_mask(pid: int, mask: str, number: signal.Signals) -> bool:
    """Whether a signal is in one of a process's masks; see proc_pid_status(5)."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if found := re.search(rf"^{mask}:\s*(\w+)$", status, re.MULTILINE):
            return bool(int(found[1], 16) >> (number - 1) & 1)
    return False


def torchrun_agent() -> int | None:
    """The pid of the torchrun that started this process; None if something else did, such as a shell in between."""
    parent = keeper_link.starter()
    named = process_name(parent) == "pt_elastic"  # `torch.distributed.run` names its thread so
    return parent if under_torchrun() and named else None


def is_plain_torchrun(launcher: int) -> bool:
    """Whether a process is torchrun, which prints a traceback when a signal stops it, and not our agent."""
    return process_name(launcher) == "pt_elastic" and not _in_mask(launcher, "SigCgt", REFUSAL)


def can_lose_a_node(agent: int) -> bool:
    """Whether the job of this torchrun goes on without its node: started by our launchers, or --nnodes MIN:MAX."""
    typed = f"--nnodes={os.environ.get('PET_NNODES', '')}\0"
    with contextlib.suppress(OSError):
        typed += Path(f"/proc/{agent}/cmdline").read_text()
    return "EVENKEEL_LARGEST_WORLD" in os.environ or bool(re.search(r"--nnodes[=\0](\d+):(?!\1\0)", typed))


def end_agent(agent: int, failed: bool = False, by: signal.Signals = REFUSAL) -> None:
    """End torchrun without a restart of its workers, and wait for its end, 5 seconds at most.

    An agent of ours gets the signal `by`, torchrun one that it does not handle, because it prints a traceback for the
    others. Some torchruns need SIGTERM: process 1 of a container, which no other signal ends; one with --redirects or
    --tee, which has still to print what it captured; and one that should end with exit code 1 (`failed`).
    """
    with contextlib.suppress(OSError):  # it has just ended
        workers = [rank for rank in ranks_of(agent) if rank != os.getpid()]
        shown = os.path.samestat(Path(f"/proc/{agent}/fd/2").stat(), os.fstat(2))
        quiet = shown and agent != 1 and not failed
        number = by if _in_mask(agent, "SigCgt", by) else REFUSAL if quiet else signal.SIGTERM
        if os.getppid() != agent:
            return  # it has ended, and its pid may now be another process's
        os.kill(agent, number)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself; go on with the others
                os.kill(worker, signal.SIGTERM)
    await_parents_death(5, agent)


def ranks_of(agent: int) -> list[int]:
    """The ranks that a torchrun has started, by pid; not children from a shell that became torchrun by `exec`."""
    found = []
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            with contextlib.suppress(OSError):
                if b"\0TORCHELASTIC_RUN_ID=" in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
                    found.append(child)
    return found


def await_parents_death(seconds: float, parent: int) -> bool:
    """Wait for the parent's death, at most so long; return whether it has died.

    The wait is over too if the parent, an agent of ours, stops a keeper, which blocks SIGTERM: it waits for the keeper.
    """
    deadline = time.monotonic() + seconds
    while os.getppid() == parent and signal.SIGTERM not in signal.sigpending() and time.monotonic() < deadline:
        time.sleep(0.02)
    return os.getppid() != parent


def count_cores() -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def kill_at_exit(workers: Collection[BaseProcess]) -> None:
    """Kill these loader processes at exit, because Python would send them SIGTERM, which they ignore, and wait."""
    if workers:
        alive = multiprocessing.active_children()
        _workers[:] = [*(it for it in _workers if it in alive), *workers]
        atexit.unregister(_kill_workers)  # once, and after torch's functions: the last one registered runs first
        atexit.register(_kill_workers)


def _kill_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as in `clean_up_before_exit`
    for worker in _workers:
        worker.kill()


def shorten_temp_dir() -> None:
    """Create `multiprocessing`'s folder below /tmp if a socket's path in the usual one would be too long.

    Otherwise a worker's thread would fail and training would wait for its batch. Python 3.14 does the same.
    This process creates the folder, because it removes it at exit; workers are killed.
    """
    longest = 103  # bytes in the path of a socket, on macOS; Linux takes 107
    if len(os.fsencode(tempfile.gettempdir())) > longest - len("/pymp-12345678/listener-12345678"):
        tempfile.tempdir = "/tmp"  # noqa: S108
    get_temp_dir()


def outlive_signals(_worker: int) -> None:
    """Make a loader process live exactly as long as its training process.

    Slurm signals every process of a step, and Ctrl-C every process of a terminal; without loaders the step in progress
    would fail. Signals are ignored, not blocked: a mask covers one thread; a process that was not forked has several.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # where a server forks them, it is their parent
    served = multiprocessing.get_start_method(allow_none=True) == "forkserver"
    die_with_parent(signal.SIGKILL, os.getppid() if served else getattr(multiprocessing.parent_process(), "pid", 0))
    sys.excepthook = _say_unless_killed


def _say_unless_killed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of the thread that sends tensors, unless the training process has just been killed.

    The kernel closes the sockets of a killed process a moment before it signals its children.
    """
    if issubclass(kind, (ConnectionError, EOFError)):
        time.sleep(1)  # if the training process is dead, so is this one by then
    sys.__excepthook__(kind, error, trace)

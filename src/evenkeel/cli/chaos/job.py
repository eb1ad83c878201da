"""The job under chaos: its command on this machine or on each node of a lab, and the processes below it.

Only descendants of this process are touched. A process whose parent has died stays among them by `adopt_orphans`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...common.processes import Stat, descendants, process_name, start_in_session
from .nodes import Lab, send

PATIENCE = 60.0  # seconds from SIGTERM to SIGKILL; torchrun gives its workers 30, under our launchers 45


class Worker(NamedTuple):
    """A rank of the job."""

    rank: int
    pid: int  # of what trains
    started: int  # pid of what torchrun started: its keeper, or without one the same
    agent: int  # pid of the torchrun that started it


class Job:
    """The commands that run now, by node; without a lab there is one node, number 0.

    On a lab `{node}` and `{master}` in the command stand for the node's number and for the address of node 0.
    """

    def __init__(self, command: Sequence[str], lab: Lab | None = None) -> None:
        self.command, self.lab = command, lab
        self.nodes = lab.nodes if lab else range(1)
        self.running: dict[int, subprocess.Popen[Any]] = {}
        self.starts = 0
        """Commands started so far, over all nodes."""

    def start(self, *nodes: int) -> None:
        """Start the command on some nodes."""
        self.starts += len(nodes)
        for node in nodes:
            if self.lab:
                master = self.lab.address(0)
                argv = [word.replace("{node}", str(node)).replace("{master}", master) for word in self.command]
                self.running[node] = self.lab.popen(node, argv, cwd=Path.cwd())
            else:
                # Ctrl-C is for chaos, which then ends the job in its own way
                self.running[node] = start_in_session(self.command, stdin=subprocess.DEVNULL)

    def ended(self) -> dict[int, int]:
        """Exit codes of the commands that have ended, by node."""
        return {node: code for node, process in self.running.items() if (code := process.poll()) is not None}

    def workers(self) -> list[Worker]:
        """The ranks under a living torchrun, in order.

        Their children, such as data loaders, do not count.
        """
        below = self._owned()
        ranks = {pid: rank for pid in below if (rank := rank_of(pid)) is not None}
        agents = {pid: below[pid].parent for pid in ranks}
        trainers = {agents[pid]: pid for pid in ranks if process_name(pid) == "trainer"}
        started = [(pid, agent) for pid, agent in agents.items() if agent not in ranks]
        return sorted(Worker(ranks[pid], trainers.get(pid, pid), pid, agent) for pid, agent in started)

    def stop(self, *nodes: int) -> None:
        """End the command on some nodes by SIGTERM, and wait until all its ranks have saved and ended.

        Frozen ranks get SIGKILL, and so do all that remain after PATIENCE.
        """
        commands = [self.running.pop(node) for node in nodes]
        for command in commands:
            if self.lab:
                self.lab.signal(command, signal.SIGTERM)
            else:
                command.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while True:
            late, others = time.monotonic() > deadline, self._owned()
            below = descendants(os.getpid()).items()
            ranks = {pid: status for pid, status in below if pid not in others and rank_of(pid) is not None}
            for pid, status in ranks.items():
                if late or status.state == "T":
                    send(pid, signal.SIGKILL)
            for command in commands:
                if late:
                    command.kill()
            if not ranks and all(command.poll() is not None for command in commands):
                return
            time.sleep(0.1)

    def _owned(self) -> dict[int, Stat]:
        return descendants(*(process.pid for process in self.running.values()))


def rank_of(pid: int) -> int | None:
    """RANK in the environment that torchrun gave a process, which its children inherit; None for others."""
    try:
        environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    rank = re.search(rb"\0RANK=(\d+)", environ)
    # a cluster that numbers its nodes by RANK sets it around torchrun too
    return int(rank[1]) if rank and b"\0TORCHELASTIC_RUN_ID=" in environ else None


def kill_descendants() -> None:
    """SIGKILL everything below this process, for up to ten seconds."""
    deadline = time.monotonic() + 10
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)

"""The job under chaos: the user's command, once on this machine or once on each node of a lab."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..processes import die_with_parent
from . import tree
from .nodes import Lab
from .tree import Worker

PATIENCE = 60.0
"""Seconds from SIGTERM to SIGKILL. torchrun itself gives its workers 30, under our launchers 45."""


class Job:
    """What runs now, by node; without a lab there is one node, number 0.

    Args:
        command: an argument list. On a lab `{node}` and `{master}` in it stand for the node's number and for the
            address of node 0.
        lab: the nodes, entered; None for this machine.
    """

    def __init__(self, command: Sequence[str], lab: Lab | None = None) -> None:
        self.command, self.lab = command, lab
        self.nodes = lab.nodes if lab else range(1)
        self.running: dict[int, subprocess.Popen[Any]] = {}
        self.starts = 0
        """Commands started so far, over all nodes."""

    def start(self, node: int) -> None:
        """Start the command on a node."""
        self.starts += 1
        if self.lab:
            facts = {"{node}": str(node), "{master}": self.lab.address(0)}
            argv = list(self.command)
            for name, value in facts.items():
                argv = [word.replace(name, value) for word in argv]
            self.running[node] = self.lab.popen(node, argv, cwd=Path.cwd())
        else:
            self.running[node] = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for chaos, which then ends the job in its own way
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )

    def ended(self) -> dict[int, int]:
        """Node -> exit code of the commands that are over."""
        codes = {node: process.poll() for node, process in self.running.items()}
        return {node: code for node, code in codes.items() if code is not None}

    def workers(self) -> list[Worker]:
        """The ranks that live under a living agent."""
        return tree.workers(*(process.pid for process in self.running.values()))

    def stop(self) -> None:
        """End the command on all nodes by SIGTERM and wait for it; frozen ranks get SIGKILL."""
        for process in self.running.values():
            if self.lab:
                self.lab.signal(process, signal.SIGTERM)
            else:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while len(self.ended()) < len(self.running) and time.monotonic() < deadline:
            for pid, state in self._ranks().items():
                if state == "T":
                    tree.send(pid, signal.SIGKILL)
            time.sleep(0.1)
        for node in list(self.running):
            self.forget(node)

    def forget(self, node: int) -> None:
        """Clear away what a command has left, itself by SIGKILL if need be.

        Ranks whose agent has died get the time to save; frozen ones do not.
        """
        self._kill_command(node)
        deadline = time.monotonic() + PATIENCE
        while orphans := self._orphans():
            for pid, state in orphans.items():
                if state == "T" or time.monotonic() > deadline:
                    tree.send(pid, signal.SIGKILL)
            time.sleep(0.1)

    def kill_node(self, node: int) -> None:
        """Crash a node of the lab, and with it the command there."""
        assert self.lab
        self.lab.kill_node(node)
        self._kill_command(node)

    def _kill_command(self, node: int) -> None:
        process = self.running.pop(node)
        process.kill()
        process.wait()

    def _orphans(self) -> dict[int, str]:
        """Pid -> state of ranks, and children of ranks, that are no longer below a command."""
        owned = tree.descendants(*(process.pid for process in self.running.values()))
        return {pid: state for pid, state in self._ranks().items() if pid not in owned}

    def _ranks(self) -> dict[int, str]:
        """Pid -> state of all ranks, and children of ranks, that this process has started in the end."""
        below = tree.descendants(os.getpid())
        return {pid: status.state for pid, status in below.items() if tree.rank_of(pid) is not None}

"""Whether a start is a restart of the same launch, which --fresh must not take for another one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ..common import keeper_link
from ..common.processes import stat


def launch_token() -> str:
    """An id of what restarts this process: torchrun's agent, else a keeper; empty without either.

    Its host, pid and start time; or EVENKEEL_LAUNCH, by which a scheduler marks a job as the same one. Without a token
    each start counts as typed again, also in a loop of a shell.
    """
    if known_as := os.environ.get("EVENKEEL_LAUNCH"):
        return known_as
    if (pid := restarter()) == os.getpid():
        return ""
    known = stat(pid)  # without /proc the pid must do
    return f"{socket.gethostname()}:{pid}:{known.started if known else '?'}"


def restarter() -> int:
    """The pid of what restarts this process: torchrun's agent, else a keeper; of this process without either."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return keeper_link.launcher()
    return os.getppid() if keeper_link.has_keeper() else os.getpid()


def restarts_elsewhere(status: Mapping[str, Any]) -> bool:
    """Whether another launch will start the run with this status again: on this host lives what restarts its rank 0."""
    known = stat(pid := status.get("pid", 0))
    if not known or known.state == "Z":
        return False
    tokens = status.get("launch", [])  # in an elastic job rank 0 may move to another agent of the same launch
    return f"{socket.gethostname()}:{pid}:{known.started}" in tokens and launch_token() not in tokens


def is_restart(status: Mapping[str, Any], tokens: Sequence[str]) -> bool:
    """Whether the launch with these tokens of its ranks has itself begun the run with this status."""
    return bool(set(filter(None, tokens)) & set(status.get("launch", [])))

"""Whether a start is a restart of the same launch, which --fresh must not take for another one."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ..common import keeper_link
from ..common.processes import stat, under_torchrun


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
    if under_torchrun():
        return keeper_link.starter()
    return os.getppid() if keeper_link.has_keeper() else os.getpid()


def restarts_elsewhere(status: Mapping[str, Any]) -> bool:
    """Whether another launch will start the run with this status again: on this host lives what restarts its rank 0."""
    tokens = status.get("launch", [])  # in an elastic job rank 0 may move to another agent of the same launch
    of_rank_0 = [token for token in tokens if token.split(":")[1:2] == [str(status.get("pid"))]]
    return any(map(is_alive, of_rank_0)) and launch_token() not in tokens


def is_alive(token: str) -> bool:
    """Whether the process of a :func:`launch_token` lives on this host; False for a scheduler's."""
    host, _, process = token.partition(":")
    pid, _, started = process.partition(":")
    known = stat(int(pid)) if host == socket.gethostname() and re.fullmatch("[0-9]{1,9}", pid) else None
    return known is not None and known.state != "Z" and str(known.started) == started


def is_restart(status: Mapping[str, Any], tokens: Sequence[str]) -> bool:
    """Whether the launch with these tokens of its ranks has itself begun the run with this status."""
    return bool(set(filter(None, tokens)) & set(status.get("launch", [])))

"""The process beside rank 0's keeper that serves the job's store, where no agent of torchrun's does.

In rank 0 it would be a thread, and die with it. Its pid is in the environment (`keeper_link.STORE`), so a keeper that
replaces itself by exec still knows it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta

from ..common import keeper_link
from ..common.processes import die_with_parent, name_process
from ..distributed.rendezvous import job_store
from .peers import CONNECT_TIMEOUT


def serve_store(rank: int, world_size: int) -> None:
    """Start the process that serves the job's store."""
    if keeper_link.STORE in os.environ:  # this process has replaced itself
        return
    keeper = os.getpid()
    ready, started = os.pipe()
    if pid := os.fork():
        os.close(started)
        if os.read(ready, 1):  # else rank 0 tries again, and reports the error
            os.environ[keeper_link.STORE] = str(pid)
        os.close(ready)
        return
    name_process("store")
    die_with_parent(signal.SIGKILL)
    with contextlib.suppress(Exception):
        store = job_store(rank, world_size, timedelta(seconds=CONNECT_TIMEOUT))
        os.write(started, b"1")
        os.close(started)
        while store and os.getppid() == keeper:  # the name keeps the store alive
            signal.sigwait({signal.SIGTERM, signal.SIGINT})  # to the process group: only the keeper acts on them
    os._exit(1)


def store_is_alive() -> bool:
    """Whether the process with the store still runs; True if there is none."""
    if keeper_link.STORE not in os.environ:
        return True
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(int(os.environ[keeper_link.STORE]), os.WNOHANG) == (0, 0):
            return True
    del os.environ[keeper_link.STORE]  # another process may get its number
    return False


def end_store() -> None:
    """End the process with the store, if there is one."""
    with contextlib.suppress(KeyError, ProcessLookupError, ChildProcessError):
        server = int(os.environ.pop(keeper_link.STORE))
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)

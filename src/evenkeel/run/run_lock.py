"""The lock of a run's folder: rank 0 has it as long as it lives, so that two jobs cannot train in one folder."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from functools import partial
from pathlib import Path
from typing import IO, Any

from ..common.display import near, say
from ..common.errors import Refusal
from ..common.files import LOCK, try_lock, unlock
from .launch_token import restarts_elsewhere
from .records import read_facts

LOCK_TIMEOUT = 10.0
"""Seconds beyond --grace to wait for the lock: a restarted rank 0 may meet its dying predecessor."""

MAX_LOCK_TIMEOUT = 100.0
"""Maximum seconds of both: the other ranks wait `world.RESTART_TIMEOUT` for rank 0."""

SAY_AFTER = 1.0
"""Seconds before a start says that it waits for the run's lock: a dying predecessor needs less, a job of another
command more."""


class RunLock:
    """Locks a folder until this process ends, however it ends, or until :meth:`release`.

    Args:
        path: the folder.
        timeout: seconds to wait for another job's end.

    Raises:
        Refusal: another job has it, or will have it again: between the death of its rank 0 and its restart.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self._path, self._file = path, (path / LOCK).open("ab")
        silent = 0.0 if restarts_elsewhere(self._holder()) else min(SAY_AFTER, timeout)
        if self._take(time.monotonic() + silent):
            return
        if timeout > silent:
            wait = f"waiting up to {timeout - silent:.0f} s, in case it is ending"
            say(f"evenkeel: {self._in_use()}; {wait}", to_stderr=True)
        if not self._take(time.monotonic() + timeout - silent):
            on_this_host = restarts_elsewhere(holder := self._holder())
            how = f" (kill -INT {holder['pid']})" if on_this_host else ""
            raise Refusal(f"{self._in_use()}; stop that job{how} or name another folder")

    def release(self) -> None:
        """Unlock the folder."""
        unlock(self._file)
        self._file.close()

    def _take(self, until: float) -> bool:
        while try_lock(self._file, until):
            if not restarts_elsewhere(self._holder()):
                os.register_at_fork(after_in_child=partial(_close, weakref.ref(self._file)))
                return True
            unlock(self._file)
            if time.monotonic() >= until:
                break
            time.sleep(0.05)
        return False

    def _holder(self) -> dict[str, Any]:
        """The status of the run there: who has begun it."""
        return read_facts(self._path / "status.json")[0]

    def _in_use(self) -> str:
        holder = self._holder()
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        return f"--run-dir {near(self._path)}: is in use by {who}"


def _close(file: weakref.ref[IO[bytes]]) -> None:
    """In a fork: a child that outlives this process must not keep its lock."""
    if copy := file():
        copy.close()


def in_use(path: Path) -> bool:
    """Whether a job has locked the folder; False also where nodes share no locks."""
    with contextlib.suppress(OSError), (path / LOCK).open("r+b") as file:
        return not try_lock(file)
    return False

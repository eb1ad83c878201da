"""Messages between the keepers of a job, in the job's store."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from ..common import keeper_link
from ..common.errors import EndedHere
from ..common.processes import under_torchrun
from ..distributed.rendezvous import DIED, DO_NOT_WAIT, generation_store, job_store
from .hang import HUNG, WATCH

REQUEST_TIMEOUT = 10.0
"""Seconds for an answer of the store, whose machine may be gone. The keeper does nothing else meanwhile."""

CONNECT_TIMEOUT = 60.0
"""Seconds for a connection: torch looks up the other end's name, which in a container without DNS takes over ten."""

CONFIRM_TIMEOUT = 5.0
"""Seconds to wait for a keeper to report the death that explains a loss; one second without torchrun's agent."""

FINISH_TIMEOUT = 300.0
"""Seconds that a finished rank waits for the others; torchrun's agents wait for each other as long."""

DONE, SAW_ALL_DONE = "done", "saw_all_done"
"""Keys of a generation: how many ranks have finished, and how many keepers know that all have."""


class Peers:
    """The keepers of the other ranks, as one keeper reaches them; see :meth:`join`.

    Args:
        rank: this keeper's.
        world_size: the number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.interval = max(0.05, world_size / 5000)
        """Seconds between two questions: the store serves some ten thousand a second."""
        self._generation = ""
        self._job_store: Store | None = None
        self._store: Store | None = None
        self._sockets: list[socket.socket] = []  # of the job's

    def join(self, generation: str) -> None:
        """Exchange messages from now on with the ranks that meet under this name."""
        self._generation, self._store = generation, None
        # the store has just answered this rank, so connecting will not block the keeper
        with contextlib.suppress(RuntimeError, OSError, EndedHere):
            self._job_store = self._job_store or self._connect()
            self._store = generation_store(self._job_store, self._world_size, generation)

    def leave(self) -> None:
        """Exchange no messages until the next :meth:`join`."""
        self._generation, self._store = "", None

    def _connect(self) -> Store:
        """A connection with a time-out on its socket, because some of torch's requests have none."""
        before = _sockets()
        store = job_store(self._rank, self._world_size, timedelta(seconds=CONNECT_TIMEOUT))
        store.set_timeout(timedelta(seconds=REQUEST_TIMEOUT))
        self._sockets = [socket.socket(fileno=os.dup(number)) for number in _sockets() - before]
        for connection in self._sockets:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(REQUEST_TIMEOUT), 0))
        return store

    def _disconnect(self) -> None:
        """Give up on a store that is gone or too slow, until the next generation meets in it: a new connection to a
        frozen one would never end."""
        self._job_store = self._store = None
        self._sockets = []

    def _rejoin(self) -> None:
        """Join again after the store was lost, if it answers now. A child tries that first, as it may never end."""
        with contextlib.suppress(OSError):  # no more processes
            if not (child := os.fork()):
                try:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(int(REQUEST_TIMEOUT))  # ends it, unlike a handler in Python, which waits for torch
                    self.join(self._generation)
                finally:  # whatever happens: this is no second keeper
                    os._exit(0 if self._store else 1)
            if os.waitpid(child, 0)[1] == 0:
                self.join(self._generation)

    def _is_cut_off(self) -> bool:
        """Whether the store has closed the connection, as when its keeper ends: torch would print a stack of C++."""
        poll = select.poll()
        for connection in self._sockets:
            poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def learn_of_death(self) -> bool:
        """Ask whether a keeper has reported a death, and leave its cause in the environment for the next trainer. False
        also if the store does not answer."""
        try:
            if self._is_cut_off():
                self._disconnect()
            if self._store and self._store.check([DIED]):
                os.environ[keeper_link.LAST_END] = self._store.get(DIED).decode()
                return True
        except RuntimeError:
            self._disconnect()
        return False

    def hang_of(self) -> str:
        """Which ranks hung, if the others found this one frozen, and so killed it; else ""."""
        with contextlib.suppress(RuntimeError):  # `report_death` asks the same store again
            if self._store and self._store.check([key := f"{WATCH}/{HUNG}/{self._rank}"]):
                return self._store.get(key).decode()
        return ""

    def report_death(self, how: str) -> bool:
        """Report to the others how this rank has died; False if that failed although there are others."""
        os.environ[keeper_link.LAST_END] = how
        if not self._generation:
            return True
        try:
            if self._store:
                self._store.set(DIED, how)
                return True
        except RuntimeError:
            self._disconnect()
        return False

    def confirm_death(self, wait_for_stop: Callable[[float], bool]) -> bool:
        """Wait until another keeper reports that its rank has died, which explains why this one lost it.

        Args:
            wait_for_stop: waits so many seconds, and returns whether a stop signal has come.
        """
        deadline = time.monotonic() + (CONFIRM_TIMEOUT if under_torchrun() else 1.0)
        while not self.learn_of_death():
            if time.monotonic() > deadline or wait_for_stop(self.interval / 4):
                return False
        return True

    def report_leaving(self) -> None:
        """Report to the others that this rank ends for good without having finished: do not wait for it."""
        with contextlib.suppress(RuntimeError):
            if self._store:
                self._store.set(DO_NOT_WAIT, "")

    def await_all(self, wait_for_stop: Callable[[float], bool]) -> bool:
        """Wait for all ranks to finish, after a finished run; False if one has died, and needs the others.

        Args:
            wait_for_stop: as in :meth:`confirm_death`.
        """
        if self._generation and not self._store:
            self._rejoin()
        deadline = time.monotonic() + FINISH_TIMEOUT
        try:
            store = self._store
            if not store or store.check([DO_NOT_WAIT]):
                return True
            store.add(DONE, 1)
            while store.add(DONE, 0) < self._world_size and time.monotonic() < deadline:
                if self.learn_of_death():
                    return False
                if not self._store:  # it has just been lost
                    return True
                if store.check([DO_NOT_WAIT]) or wait_for_stop(self.interval):
                    return True
            aware, deadline = store.add(SAW_ALL_DONE, 1), time.monotonic() + 1
            while keeper_link.STORE in os.environ and aware < self._world_size and time.monotonic() < deadline:
                time.sleep(self.interval / 4)  # this keeper's end ends the store, which the others are still reading
                aware = store.add(SAW_ALL_DONE, 0)
        except RuntimeError:
            self._disconnect()
        return True


def _sockets() -> set[int]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("socket:"):  # is_socket() would ask the file system, which may be gone
                found.add(int(link.name))
    return found

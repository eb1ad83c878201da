"""Which job writes to a store: an object with the job's id, its host and a time, renewed as long as the job lives."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from ..common.errors import Refusal
from .store import Store

NAME = "lease.json"
RENEWED, PATIENCE = 10.0, 25.0
"""Seconds between two renewals; after so many without one the job is dead. Clocks may differ, so none is compared."""
SETTLES, LONG_AGO = 1.0, 600.0
"""Seconds until a job that began at the same moment has written too; after which even a wrong clock knows the end."""


class Lease:
    """The right to write to a store, of node 0 of a job; `job` is the same for all its restarts, if it has a name."""

    def __init__(self, store: Store, job: str) -> None:
        self.store, self.job, self.mine = store, job, False

    def acquire(self) -> None:
        """Take it, after waiting if its job may be dead. Refused if another job renews it."""
        before, until = self._others(), time.monotonic() + PATIENCE
        while before and time.time() - before["time"] < LONG_AGO and time.monotonic() < until:
            time.sleep(min(1.0, RENEWED / 4))
            now = self._others()
            self._refuse(now if now != before else {})
            before = now
        self._write()
        time.sleep(SETTLES)
        self._refuse(self._others())
        self.mine = True

    def renew(self) -> None:
        """Write the time again. Refused if another job has taken it, after this one could not renew it in time."""
        self.mine = not (others := self._others())
        self._refuse(others)
        self._write()

    def release(self) -> None:
        """Delete it, if it is this job's."""
        if self.mine and not self._others():
            self.store.remove(NAME)
        self.mine = False

    def _others(self) -> dict[str, Any]:
        """The lease of another job; {} if there is none."""
        try:
            found = json.loads(self.store.read(NAME) or b"{}")
            lease = {"run": str(found["run"]), "host": str(found["host"]), "time": float(found["time"])}
        except (ValueError, TypeError, LookupError):  # cut short
            return {}
        return {} if lease["run"] == self.job else lease

    def _write(self) -> None:
        lease = {"run": self.job, "host": socket.gethostname(), "time": time.time()}
        self.store.write(NAME, json.dumps(lease).encode())

    def _refuse(self, lease: dict[str, Any]) -> None:
        if lease:
            raise Refusal(f"--mirror {self.store.url}: a job on {lease['host']} writes there; name another URL")

"""The folder of one run, across all its restarts: who may use it, which run it is, and its state.

Rank 0 locks it as long as it lives, so that two jobs cannot train in the same folder. Only rank 0 writes there, except
for the other ranks' logs, traces and rescues, and what another rank or a scheduler says of its end.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import tomli_w

from ..common.display import near
from ..common.errors import Refusal
from ..common.files import write_atomically, write_json
from ..common.repeats import Repeats
from . import crash_loop
from .earlier_run import is_run, is_untrained
from .identity import Identity, move_aside, prepare_folder, refuse_another_run
from .launch_token import is_restart, restarter
from .records import attempt_ends, read_facts
from .run_lock import LOCK_TIMEOUT, MAX_LOCK_TIMEOUT, RunLock, in_use

log = logging.getLogger(__name__)

RunState = Literal["running", "finished", "stopped", "failed"]


@dataclass
class RunDirectory:
    """Rank 0's handle on a run's folder. Make it with :func:`claim`."""

    path: Path
    status: dict[str, Any]
    """The content of status.json."""
    lock: RunLock
    trouble: str = ""
    """A description of what is wrong with the existing status.json, or ""."""
    untrained: bool = False
    """Whether the run that is there has trained nothing."""
    _options: dict[str, Any] = field(default_factory=dict)  # of this attempt; empty before `begin`
    _over: bool = False  # an end is recorded: nothing changes after it
    _claimed: float = field(default_factory=time.monotonic)  # when the folder was
    _seconds_before: float = 0.0  # of earlier attempts
    _failures: Repeats = field(default_factory=Repeats)
    _updating: threading.Lock = field(default_factory=threading.Lock)

    @property
    def attempts(self) -> int:
        """Starts of this run so far."""
        return len(self.status.get("world_sizes", []))

    @property
    def recorded(self) -> bool:
        """Whether this attempt is recorded."""
        return bool(self._options)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all attempts that recorded theirs."""
        return round(self._seconds_before + time.monotonic() - self._claimed, 3)

    def release(self) -> None:
        """Unlock the folder, for a process that goes on after the run."""
        self.lock.release()

    def start_over(self, tokens: Sequence[str]) -> str:
        """Move the run in the folder aside. One that has trained nothing stays, and its logs go on.

        Args:
            tokens: the `launch_token` of every rank. torchrun's restart count would not do: it stays 0 if a node joins.

        Returns:
            A line about it; "" if there is no run, or if this launch has begun it and only restarts.

        Raises:
            Ended: it cannot be moved.
        """
        if not is_run(self.path) or is_restart(self.status, tokens):
            return ""
        self.trouble, here = "", near(self.path)
        if self.untrained:
            self.status = {"world_sizes": self.status.get("world_sizes", [])}
            return f"nothing was trained in {here}; starting again"
        self.status, aside = {}, move_aside(self.path)
        return f"--fresh: the run that was in {here} is now in {near(aside)}"

    def begin(self, options: dict[str, Any], tokens: Sequence[str], **facts: Any) -> None:
        """Record an attempt: the options as they are now, the launch, the number of ranks, and facts about the run."""
        restarted = is_restart(self.status, tokens)
        launch = set(filter(None, tokens)) | set(self.status["launch"] if restarted else ())
        facts |= {"launch": sorted(launch), "world_sizes": [*self.status.get("world_sizes", []), len(tokens)]}
        facts["run_id"] = self.status.get("run_id") or uuid4().hex  # an older version made none
        facts |= crash_loop.counted(self.status, restarted) | {"reason": ""}
        self._over, self._seconds_before = False, self.status.get("seconds", 0.0)
        self.update("running", **facts)  # first, because a run is known by its status.json
        _write_config(self.path, options)
        self._options = options

    def update(self, state: RunState, **facts: Any) -> None:
        """Rewrite status.json with a new state and some facts; the others stay. Any thread may call it.

        After an end nothing changes: the training may still be going on while another thread ends the process.
        """
        with self._updating:
            if self._over:
                return
            if reason := facts.get("reason"):  # may name a file that is not in UTF-8
                facts["reason"] = reason.encode(errors="backslashreplace").decode()
            # the pid is that of what restarts rank 0: torchrun's agent or a keeper
            self.status |= {"host": socket.gethostname(), "pid": restarter(), "time": time.time()} | facts
            self._make_again()
            write_json(self.path / "status.json", self.status | {"state": state})
            # an end that could not be written is none: the failure is recorded instead
            self.status["state"], self._over = state, state != "running"

    def update_at_step(self, state: RunState, step: int, **facts: Any) -> None:
        """Update, with the step that was reached, which need not be saved, and the seconds so far."""
        self.update(state, step=step, seconds=self.seconds, **facts)

    def try_update(self, **facts: Any) -> None:
        """Update, but log a full disk instead of ending the run."""
        try:
            self.update("running", **facts)
        except OSError as error:
            self._failures.log(log, f"status.json: {error}")

    def record_progress(self) -> None:
        """Record the first finished step of this attempt; called after each."""
        if self.status["fruitless"]:
            self.try_update(**crash_loop.CLEARED)

    def _make_again(self) -> None:
        """Make the folder again if it was deleted during the run: without config.toml the rest is useless."""
        if not self._options or (self.path / "config.toml").exists():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / ".lock").exists():
            try:
                self.lock = RunLock(self.path, timeout=0.0)
            except Refusal as refusal:  # this job cannot be refused any more
                log.error("%s", refusal)
        _write_config(self.path, self._options)
        log.error("%s was deleted during the run and has been made again", self.path)


def claim(path: Path, run: Identity, fresh: bool, grace: float = 0.0) -> RunDirectory:
    """Check the folder by :func:`prepare_folder`, and lock it for rank 0 of this job, or refuse if it is in use for
    longer than --grace, in which a job that was told to stop writes its last step."""
    prepare_folder(path, run, fresh)
    lock = RunLock(path, min(LOCK_TIMEOUT + grace, MAX_LOCK_TIMEOUT))
    untrained = is_untrained(path)  # again: the previous job may have started over
    if not (fresh or untrained):
        refuse_another_run(path, run)
    status, trouble = read_facts(path / "status.json")
    if trouble and "world_sizes" not in status:  # the number of starts, and with it the names of logs
        starts = [it for it in attempt_ends(path / "metrics.jsonl") if it["kind"] == "start"]
        status["world_sizes"] = [it.get("world_size", 1) for it in starts]
    return RunDirectory(path, status, lock, trouble, untrained)


def copy_run_records(path: Path, options: dict[str, Any], status: dict[str, Any], fresh: bool) -> Path | None:
    """Write a copy of the run's options and rank 0's status on a node without rank 0, so that it can continue here
    alone. With ``fresh`` an older launch's run is moved aside; returns where.

    On a shared file system the folder is rank 0's own, which holds its lock, and nothing is done.
    """
    mine, _ = read_facts(path / "status.json")
    # rank 0's own: locked (a cached status may be old), or of the same status (nodes may share no locks)
    if in_use(path) or mine == {name: fact for name, fact in status.items() if fact is not None}:
        return None
    aside = move_aside(path) if fresh and not is_restart(mine, status["launch"]) and is_run(path) else None
    _write_config(path, options)
    # only rank 0 learns of finished steps, so the count would soon be wrong here
    write_json(path / "status.json", {**status, **crash_loop.CLEARED})
    return aside


def mark_failed(file: Path, reason: str, **facts: Any) -> None:
    """Record a failure in status.json in place of rank 0, which has ended, cannot run, or does not know the reason."""
    write_json(file, {"world_sizes": []} | read_facts(file)[0] | {"state": "failed", "reason": reason} | facts)


def _write_config(path: Path, options: dict[str, Any]) -> None:
    write_atomically(path / "config.toml", lambda file: file.write(tomli_w.dumps(options).encode()), private=True)

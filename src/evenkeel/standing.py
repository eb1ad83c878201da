"""How a run stands: what it left in its folder, whether a process of it is alive, and what Slurm says of its job.

Reads only. A folder alone cannot tell: the status.json of a run that was killed says "running" for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .ledger import goodput, ledger
from .naming import TEST, TRAIN, named
from .processes import stat
from .records import read_facts, read_record
from .run_directory import ASIDE
from .slurm.jobs import JobStatus
from .slurm.record import load

State = Literal["queued", "running", "finished", "stopped", "failed", "lost", "unknown"]
"""lost: it was running, and nothing of it is alive any more. unknown: that cannot be seen from here."""

RECENT = 20
"""Lines of metrics that the present speed is taken from."""

UNMEASURED = ("kind", "step", "time", "spent", "epoch")
"""What a line of metrics holds besides metrics."""

SILENCE = 600.0
"""Seconds without a sign of life after which a run of another machine is taken for dead."""


@dataclass(frozen=True)
class Standing:
    """What there is to say of one run."""

    run: str
    """Its folder, as it was found."""
    state: State
    why: str
    """Why it is not running, or who cannot be asked. Empty if there is nothing to explain."""
    step: int
    """Optimizer steps done."""
    total_steps: int | None
    """None: it has not yet said so."""
    eta: float | None
    """Seconds to its end at the speed of the last lines of metrics; None unless it is running."""
    metrics: dict[str, float | None]
    """By their full names: of the last line of training train/loss, train/lr and so on, and all of the last evaluation.
    None stands for what is not finite."""
    starts: int
    """Attempts so far."""
    goodput: float | None
    """Productive part of its time, 0 .. 1."""
    heard: float | None
    """When it last wrote something, in seconds since the epoch."""
    job_id: str | None
    """Slurm's."""
    job: JobStatus | None
    """How the job stands; None: there is none, or Slurm cannot be asked."""


class Metrics:
    """What has been written so far to a metrics.jsonl that may grow, in little memory.

    Args:
        path: of the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget(inode=0)

    def _forget(self, inode: int) -> None:
        self.last: dict[str, Any] = {}
        """The last record; `train` and `test` are the last of their kinds."""
        self.train: dict[str, Any] = {}
        self.test: dict[str, Any] = {}
        self._ends: list[dict[str, Any]] = []  # first and last of each attempt, which is all that the ledger asks for
        self._began = (0.0, 0)  # the present attempt: time and step
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._offset, self._inode = 0, inode

    def update(self) -> None:
        """Read what is new."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._forget(facts.st_ino)  # the run was started over
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                if record := read_record(line):
                    self._take(record)

    def goodput(self) -> float | None:
        """The productive part of the time that is accounted for; None before there is some."""
        return goodput(ledger(self._ends)) if self._ends else None

    def pace(self) -> float | None:
        """Seconds that a step has lately taken."""
        points = [self._began, *self._recent] if len(self._recent) == 1 else list(self._recent)
        if len(points) < 2 or points[-1][1] <= points[0][1]:
            return None
        return (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])

    def _take(self, record: dict[str, Any]) -> None:
        kind, point = record["kind"], (record["time"], record["step"])
        if "spent" in record:
            if kind != "start" and self._ends and self._ends[-1]["kind"] != "start":
                self._ends.pop()
            self._ends.append(record)
        if kind == "start":
            self._began = point
            self._recent.clear()
        elif kind == "train":
            self.train = record
            self._recent.append(point)
        elif kind == "eval":
            self.test = record
        self.last = record


def find(folder: Path) -> Iterator[Path]:
    """All runs at or below a folder, in order of their names, but for those that were moved aside."""
    for path, below, files in os.walk(folder):
        if {"config.toml", "status.json"} <= set(files) or Path(path, "slurm", "job.json").is_file():
            below.clear()
            yield Path(path)
        below[:] = sorted(name for name in below if not name.startswith(".") and not re.fullmatch(ASIDE, name))


def standing(run: Path, metrics: Metrics, job_id: str | None, job: JobStatus | None) -> Standing:
    """How a run stands.

    Args:
        run: its folder.
        metrics: of this run; is brought up to date.
        job_id: Slurm's, if it ever had one.
        job: what Slurm says of that; None: it cannot be asked.
    """
    metrics.update()
    status, trouble = _status(run)
    heard = max(metrics.last.get("time", 0.0), status.get("time", 0.0)) or None
    state, why = _judge(run, status, trouble, heard, job_id, job)
    told = metrics.last.get("step", status.get("step", 0))
    step = status.get("step", told) if status.get("state") in ("finished", "stopped", "failed") else told
    total, pace = status.get("total_steps"), metrics.pace()
    return Standing(
        run=str(run),
        state=state,
        why=why,
        step=step,
        total_steps=total,
        eta=(total - step) * pace if state == "running" and total and pace is not None else None,
        metrics=_values(TRAIN, metrics.train) | _values(TEST, metrics.test),
        starts=len(status.get("world_sizes", [])),
        goodput=metrics.goodput(),
        heard=heard,
        job_id=job_id,
        job=job,
    )


def job_id(run: Path) -> str | None:
    """The Slurm job that last worked on a run, if there was one."""
    try:
        record = load(run)
    except (OSError, ValueError):
        return None
    return record.job_id if record else None


def _status(run: Path) -> tuple[dict[str, Any], str]:
    try:
        status, trouble = read_facts(run / "status.json")
    except OSError as error:
        return {}, f"status.json cannot be read: {error}"
    return status, trouble if "state" not in status else ""


def _judge(
    run: Path, status: dict[str, Any], trouble: str, heard: float | None, job_id: str | None, job: JobStatus | None
) -> tuple[State, str]:
    """The state, and why."""
    if trouble:
        return "unknown", trouble
    said, reason = status.get("state"), str(status.get("reason") or "")
    if said == "finished":
        return "finished", reason if status.get("stopped_early") else ""
    held = _is_locked(run)
    if held and said not in ("stopped", "failed"):
        return "running", _quiet(heard)
    if said in ("running", "failed") and _an_agent_lives(status.get("launch", ())):
        return "running", f"is started again after: {reason}" if reason else "its ranks are started again"
    if job and job.is_waiting:
        return "queued", reason
    if job and job.is_known and not job.is_over:
        return "running", f"its job goes on after: {reason}" if reason else ""
    if said in ("stopped", "failed"):
        return said, reason
    if job and job.is_over:
        return ("lost" if said else "stopped" if job.state == "CANCELLED" else "failed"), f"job {job_id}: {job}"
    if not said:
        return "unknown", f"job {job_id} has left nothing, and Slurm {'does not know it' if job else 'cannot be asked'}"
    return _without_a_job(status, held, heard)


def _without_a_job(status: dict[str, Any], held: bool | None, heard: float | None) -> tuple[State, str]:
    """A run that says it is running, by the signs of life that it gives."""
    host, pid = status.get("host"), status.get("pid", 0)
    if host == socket.gethostname():
        alive = stat(pid) is not None if held is None else held
        return ("running", "") if alive else ("lost", "its process has ended without a word, or was killed")
    ago = _duration(time.time() - (heard or 0))
    if time.time() - (heard or 0) > SILENCE:
        return "lost", f"on {host}, and nothing was heard of it for {ago}"
    return "unknown", f"on {host}, which cannot be asked from here; last heard of {ago} ago"


def _is_locked(run: Path) -> bool | None:
    """Whether a process holds the run, on this machine or on another one that shares the folder; None: not to be seen.

    The lock is asked for as a reader for a moment, and a start waits for longer than that.
    """
    try:
        with (run / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def _an_agent_lives(tokens: Iterable[str]) -> bool:
    """Whether a torchrun of this machine, that started the run's ranks, is there to start them again."""
    for token in tokens:
        host, _, process = token.partition(":")
        pid, _, started = process.partition(":")
        known = stat(int(pid)) if host == socket.gethostname() and pid.isdecimal() else None
        if known and known.state != "Z" and str(known.started) == started:
            return True
    return False


def _quiet(heard: float | None) -> str:
    silent = time.time() - (heard or time.time())
    return f"nothing was heard of it for {_duration(silent)}" if silent > SILENCE else ""


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _values(part: str, record: dict[str, Any]) -> dict[str, float | None]:
    """The measured values of a line of metrics; those of version 0.1.0 had bare names."""
    return named(part, {name: value for name, value in record.items() if name not in UNMEASURED})

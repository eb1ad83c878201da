"""`python -m evenkeel follow`: a Slurm job's log and states as they come, over all its requeues, to its run's end.

Looks only, so that it may be ended and started again at any time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import tyro

from ..agent import first_error
from ..errors import FAILED, REFUSED, Refusal
from ..interruption import KEYBOARD, STOPPED
from ..keyboard import CtrlC
from ..records import read_facts
from .commands import SlurmError
from .jobs import JobStatus, ask
from .record import JobRecord, load

POLL = 0.5
"""Seconds between two looks at the log."""

ASK = 5.0
"""Seconds between two questions to Slurm's controller, which serves everybody."""

ASK_AGAIN = 1.0
"""Seconds until a job that seems to be over is asked for again. A requeue may just be coming."""

BACKLOG = 1 << 14
"""Bytes of an old log that are shown at first."""

_REFUSAL = f"{Refusal.__module__}.{Refusal.__qualname__}: "
"""So begins the last line of its traceback."""


@dataclass(frozen=True)
class FollowCommand:
    """Show what a run's Slurm job prints and how it stands, over all its requeues, until the run has ended.

      python -m evenkeel follow runs/classify

    Exit code: 0 finished, 1 failed, 2 its input was refused, 75 cancelled or stopped before its end. Ctrl-C (130)
    ends this command only.
    """

    run_dir: tyro.conf.Positional[Path]
    """A run directory."""

    def __call__(self, train_options: list[str]) -> int:
        """Follow it."""
        if train_options:
            raise Refusal(f"-- {' '.join(train_options)}: only `plan` takes options of train.py; leave them out")
        try:
            record = load(self.run_dir)
        except (OSError, ValueError) as error:
            raise Refusal(f"{self.run_dir}: its slurm/job.json cannot be read: {error}") from None
        if record is None:
            raise Refusal(f"{self.run_dir}: no Slurm job there (no slurm/job.json); name a run that was submitted")
        return follow(record)


def follow(record: JobRecord) -> int:
    """Print a job's log and its changes of state until it is over.

    Returns:
        0: the run is finished; 1: it has failed; 2: its input was refused; 75: it was cancelled or stopped;
        130: Ctrl-C, and the job goes on.
    """
    with CtrlC() as ctrl_c:
        try:
            return _Follower(record, ctrl_c).to_the_end()
        except BrokenPipeError:  # whoever read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


class _Log:
    """The new part of a file that grows, and need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ends_a_line = True
        """Whether what was copied so far does."""
        size = path.stat().st_size if path.exists() else 0
        self._offset = max(0, size - BACKLOG)
        self.skips = self._offset > 0

    def copy(self, out: IO[bytes]) -> bool:
        """Copy what is new, if there is any. The file is opened anew: NFS shows what others wrote only then."""
        before = self._offset
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            if self.skips:
                self._offset += len(file.readline())
                self.skips = False
            while part := file.read(1 << 16):
                self._offset += len(part)
                self.ends_a_line = part.endswith(b"\n")
                out.write(part)
            out.flush()
        return self._offset > before


class _Logs:
    """The new parts of the logs of all nodes, which come to be one after another."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self._logs: dict[Path, _Log] = {}
        self._look()
        self.skips = any(log.skips for log in self._logs.values())
        self.ends_a_line = True
        """Whether what was copied last does."""

    def copy(self, out: IO[bytes]) -> None:
        """Copy what is new."""
        self._look()
        for log in self._logs.values():
            if log.copy(out):
                self.ends_a_line = log.ends_a_line

    def _look(self) -> None:
        for path in self.record.logs:
            if path not in self._logs:
                self._logs[path] = _Log(path)


class _Follower:
    def __init__(self, record: JobRecord, ctrl_c: CtrlC) -> None:
        self.record, self.ctrl_c = record, ctrl_c
        self.logs = _Logs(record)
        self.job = JobStatus("")
        self.over = 0
        """Answers in a row by which the job was over, or unknown."""
        self.waited = False
        """Whether it had not been started, when Slurm last knew it."""
        self.trouble = ""
        self.ask_at = 0.0

    def to_the_end(self) -> int:
        if self.logs.skips:
            self.say(f"the end of {self.record.log}:")
        while not self.ctrl_c.wait(0):
            self.ask()
            self.logs.copy(sys.stdout.buffer)
            if self.over > 1 or (self.over and self.finished):
                return self.verdict()
            self.ctrl_c.wait(POLL)
        where = shlex.quote(self.record.run_dir)
        job = self.record.job_id
        self.say(f"goes on; `python -m evenkeel follow {where}` follows it again, `scancel {job}` ends it")
        return KEYBOARD

    def say(self, text: str) -> None:
        print("" if self.logs.ends_a_line else "\n", f"evenkeel: job {self.record.job_id}: {text}", sep="", flush=True)
        self.logs.ends_a_line = True

    def ask(self) -> None:
        """Ask Slurm, if it is time to, and tell what has changed."""
        if time.monotonic() < self.ask_at:
            return
        try:
            job = ask([self.record.job_id])[self.record.job_id]
        except SlurmError as error:
            if not self.ctrl_c.pressed and self.trouble != str(error):  # on a terminal the question hears it as well
                self.trouble = str(error)
                self.say(f"Slurm does not answer, and is asked again: {error}")
            self.ask_at = time.monotonic() + ASK
            return
        requeues = job.requeues or 0
        again = f"requeued, start {requeues + 1}: " if requeues > (self.job.requeues or 0) else ""
        if again or str(job) != str(self.job) or self.trouble:
            self.logs.copy(sys.stdout.buffer)  # what was printed before the change
            self.say(f"{again}{job}")
        self.job, self.trouble = job, ""
        if job.is_known:
            self.waited = job.is_waiting
        self.over = self.over + 1 if job.is_over or not job.is_known else 0
        self.ask_at = time.monotonic() + (ASK_AGAIN if self.over else ASK)

    @property
    def status(self) -> dict[str, Any]:
        """What the run's status.json says, unless that is older than the job or cannot be seen from here."""
        try:
            status, _ = read_facts(Path(self.record.run_dir) / "status.json")
        except OSError:
            return {}
        return status if status.get("time", 0) > self.record.submitted else {}

    @property
    def finished(self) -> bool:
        return self.status.get("state") == "finished"

    def verdict(self) -> int:
        """Say how it has ended; the exit code."""
        status, job = self.status, self.job
        said, reason = status.get("state"), status.get("reason")
        at = f" at step {status['step']}" if "step" in status and said != "running" else ""
        if said == "finished" or (job.state == "COMPLETED" and said not in ("stopped", "failed")):
            early = f" ({reason})" * bool(status.get("stopped_early"))
            self.say(f"finished{at}{early} -> {self.record.run_dir}")
            return 0
        if job.state == "CANCELLED" or (self.waited and not job.is_known):
            how = "was cancelled" if job.is_known else "has left the queue without a start, so it was cancelled"
            self.say(f"{how}{at}; submit it again to continue the run")
            return STOPPED
        if said == "stopped":
            self.say(f"stopped{at} by {reason} and was not requeued; submit it again to continue the run")
            return STOPPED
        *traceback, last = self._traceback().rstrip().splitlines() or [""]
        if last.startswith(_REFUSAL):
            self.say(f"refused: {last.removeprefix(_REFUSAL)}")
            return REFUSED
        if last:
            self.say("\n".join(["the rank that failed first says:", *traceback, last]))
        if said != "failed":
            reason = f"Slurm says {job}, and the run nothing" if job.is_known else "Slurm does not know it any more"
        self.say(f"failed{at}: {reason}; its log is {self.record.log}")
        return FAILED

    def _traceback(self) -> str:
        """Of the last start. The ranks of earlier ones may have failed for their nodes' sake."""
        if self.job.requeues is not None:
            return first_error(self.record.errors(self.job.requeues).glob("*"))
        *_, last = [None, *self.record.error_folders]
        return first_error(last.glob("*")) if last else ""

"""`python -m evenkeel follow` of a Slurm job: its log and its state, live, over all its requeues.

Only reads, so it may be ended and started again at any time.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path
from typing import IO, Any

from ...common.arguments import lose_stdout
from ...common.errors import FAILED, REFUSED, Refusal
from ...common.keyboard import CtrlC
from ...resilience.interruption import KEYBOARD, STOPPED
from ...run.records import read_facts
from ..agent import first_error
from .jobs import JobRecord, JobStatus, SlurmError, ask, load

POLL = 0.5  # seconds between two looks at the log
ASK = 5.0  # seconds between two requests to Slurm's controller, which serves all users
ASK_AGAIN = 1.0  # seconds before a job that seems over is checked again: it may be about to be requeued
BACKLOG = 1 << 14  # bytes of an old log that are shown at first
_REFUSAL = f"{Refusal.__module__}.{Refusal.__qualname__}: "  # the last line of its traceback begins like this


def follow(run_dir: Path) -> int | None:
    """Print the log and the changes of state of the newest job of a run, until it is over.

    Returns an exit code as `cli.follow` says; None if there is no such job.
    """
    try:
        record = load(run_dir)
    except (OSError, ValueError) as error:
        raise Refusal(f"{run_dir}: its slurm/job.json cannot be read: {error}") from None
    if not record:
        return None
    with CtrlC() as ctrl_c:
        try:
            return _Follower(record, ctrl_c).to_the_end()
        except BrokenPipeError:  # the reader has closed our output
            lose_stdout()
            return 0


class Logs:
    """The new parts of the logs of all nodes, which appear one after another."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.ends_a_line = True  # whether what was copied last does
        self._read = {path: max(0, path.stat().st_size - BACKLOG) for path in record.logs if path.exists()}
        self._cut = {path for path, offset in self._read.items() if offset}
        self.shortened = bool(self._cut)

    def copy(self, out: IO[bytes]) -> None:
        """Copy what is new. Open the files again each time: only then NFS shows what others wrote."""
        for path in self.record.logs:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                if path in self._cut:
                    file.readline()  # the end of one
                    self._cut.remove(path)
                while part := file.read(1 << 16):
                    self.ends_a_line = part.endswith(b"\n")
                    out.write(part)
                out.flush()
                self._read[path] = file.tell()


class _Follower:
    def __init__(self, record: JobRecord, ctrl_c: CtrlC) -> None:
        self.record, self.ctrl_c = record, ctrl_c
        self.logs = Logs(record)
        self.job = JobStatus("")
        self.over = 0  # consecutive answers that the job is over or unknown
        self.waited = False  # it had not started when Slurm last knew it
        self.trouble = ""
        self.ask_at = 0.0

    def to_the_end(self) -> int:
        if self.logs.shortened:
            self.say(f"the end of {self.record.log}:")
        while not self.ctrl_c.wait(0):
            self.ask()
            self.logs.copy(sys.stdout.buffer)
            if self.over > 1 or (self.over and self.status().get("state") == "finished"):
                return self.verdict()
            self.ctrl_c.wait(POLL)
        again = f"python -m evenkeel follow {shlex.quote(self.record.run_dir)}"
        self.say(f"continues; `{again}` follows it again, `scancel {self.record.job_id}` ends it")
        return KEYBOARD

    def say(self, text: str) -> None:
        print("" if self.logs.ends_a_line else "\n", f"evenkeel: job {self.record.job_id}: {text}", sep="", flush=True)
        self.logs.ends_a_line = True

    def ask(self) -> None:
        """Ask Slurm, if it is time to, and print what has changed."""
        if time.monotonic() < self.ask_at:
            return
        self.ask_at = time.monotonic() + ASK
        try:
            job = ask([self.record.job_id])[self.record.job_id]
        except SlurmError as error:
            if not self.ctrl_c.pressed and self.trouble != str(error):  # Ctrl-C reaches squeue as well
                self.trouble = str(error)
                self.say(f"Slurm does not answer, trying again: {error}")
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
        if self.over:
            self.ask_at = time.monotonic() + ASK_AGAIN

    def status(self) -> dict[str, Any]:
        """The run's status.json; empty if that is older than the job or cannot be read here."""
        try:
            status, _ = read_facts(Path(self.record.run_dir) / "status.json")
        except OSError:
            return {}
        return status if status.get("time", 0) > self.record.submitted else {}

    def verdict(self) -> int:
        """Say how the job has ended; returns the exit code."""
        status, job = self.status(), self.job
        said, reason = status.get("state"), status.get("reason")
        at = f" at step {status['step']}" if "step" in status and said != "running" else ""
        if said == "finished" or (job.state == "COMPLETED" and said not in ("stopped", "failed")):
            early = f" ({reason})" if status.get("stopped_early") else ""
            self.say(f"finished{at}{early} -> {self.record.run_dir}")
            return 0
        if job.state == "CANCELLED" or (self.waited and not job.is_known):
            how = "was cancelled" if job.is_known else "left the queue without a start, so it was cancelled"
            self.say(f"{how}{at}; submit it again to continue the run")
            return STOPPED
        if said == "stopped":
            self.say(f"stopped{at} by {reason} and was not requeued; submit it again to continue the run")
            return STOPPED
        # only the last start counts: earlier ones may have failed because of their nodes
        traceback = first_error(self.record.errors(job.requeues).glob("*")).rstrip()
        last = traceback.rpartition("\n")[2]
        if last.startswith(_REFUSAL):
            self.say(f"refused: {last.removeprefix(_REFUSAL)}")
            return REFUSED
        if last:
            self.say(f"the rank that failed first says:\n{traceback}")
        if said != "failed":
            reason = f"Slurm says {job}; the run recorded no reason" if job.is_known else "Slurm no longer knows it"
        self.say(f"failed{at}: {reason}; its log is {self.record.log}")
        return FAILED

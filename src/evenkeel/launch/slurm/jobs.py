"""The state of Slurm jobs, from squeue, then sacct, and the record in the run's folder."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...common.files import alike, read_json, write_json

ENDED = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"]
    + ["REVOKED", "TIMEOUT"]
)  # Slurm will not run the job again (squeue(1), JOB STATE CODES)
WAITING = frozenset(
    ["CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"]
)  # it has no process yet
# Our own state for a job that Slurm has forgotten and that is not in the accounting. A waiting array task becomes
# UNKNOWN as soon as it is cancelled.
UNKNOWN = "UNKNOWN"


class SlurmError(Exception):
    """A command of Slurm is missing, failed or did not answer; the message is one line."""


def slurm(*command: str, timeout: float = 60, env: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm prints, within `timeout` seconds; a SlurmError if it fails."""
    name = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    except (FileNotFoundError, PermissionError):
        raise SlurmError(f"{name}: not found: is this a login node of the cluster?") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{name}: no answer within {timeout:g} s; is Slurm's controller up?") from None
    if done.returncode:
        lines = (done.stderr or done.stdout or f"{name}: exit code {done.returncode}").splitlines()
        telling = [line for line in lines if ": fatal: " in line] or lines  # the other lines only lead to it
        raise SlurmError(" ".join(" ".join(telling).split()))
    return done.stdout


def without(prefix: str) -> dict[str, str]:
    """This environment without the variables that change what a command of Slurm prints."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}


@dataclass(frozen=True)
class JobStatus:
    """The state of a job."""

    state: str  # Slurm's long name, in capitals, or UNKNOWN
    reason: str = ""
    nodes: str = ""  # on which it runs or ran, as Slurm abbreviates them: node[1-2]
    requeues: int | None = None  # None: only squeue knows it, and has forgotten the job

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ENDED

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its first start or its next."""
        return self.state in WAITING

    @property
    def is_known(self) -> bool:
        """Whether Slurm knows it."""
        return self.state != UNKNOWN

    def __str__(self) -> str:
        """For people: pending (Resources), running on node[1-2]."""
        reason = f" ({self.reason})" if self.reason else ""
        where = f" on {self.nodes}" if self.nodes and self.state == "RUNNING" else ""
        return f"{self.state.lower().replace('_', ' ')}{where}{reason}"


def ask(job_ids: Iterable[str]) -> dict[str, JobStatus]:
    """The status of each job, by one request to the controller and at most one to the accounting.

    Args:
        job_ids: as Slurm writes them: 17, or 17_2 in an array.

    Raises:
        SlurmError: the controller cannot be asked.
    """
    asked = list(dict.fromkeys(job_ids))
    known = dict(_queued(asked)) if asked else {}
    if forgotten := [job_id for job_id in asked if job_id not in known]:
        known |= dict(_accounted(forgotten))
    return {job_id: known.get(job_id, JobStatus(UNKNOWN)) for job_id in asked}


def _queued(job_ids: list[str]) -> Iterator[tuple[str, JobStatus]]:
    """Those that the controller remembers: waiting, running, or ended in the last minutes."""
    columns = ["JobID", "ArrayJobID", "ArrayTaskID", "State", "Reason", "RestartCnt", "NodeList"]
    widths = ",".join(f"{column}:1024|" for column in columns)
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", f"--Format={widths}"]
    try:
        lines = slurm(*command, env=without("SQUEUE_")).splitlines()
    except SlurmError as error:
        if "Invalid job id" in str(error):  # the only job in the request is forgotten
            return
        raise
    for line in lines:
        number, array, task, state, reason, requeues, nodes = (cell.strip() for cell in line.split("|")[:7])
        if reason == "None" or state in ("CANCELLED", "COMPLETED"):
            reason = ""  # a cancelled job still shows why it waited
        yield f"{array}_{task}" if task.isdecimal() else number, JobStatus(state, reason, nodes, int(requeues))


def _accounted(job_ids: list[str]) -> Iterator[tuple[str, JobStatus]]:
    """Those that the accounting knows, if there is one."""
    columns = "--format=JobID,State,NodeList"
    try:
        output = slurm("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}", columns)
    except SlurmError:
        return
    for line in output.splitlines():
        job_id, state, nodes = line.split("|")
        state, _, by = state.partition(" ")  # CANCELLED by 1000
        yield job_id, JobStatus(state, by and f"by user {by.removeprefix('by ')}", "" if "assigned" in nodes else nodes)


@dataclass(frozen=True)
class JobRecord:
    """The newest job of a run, in ``RUN_DIR/slurm/job.json``. Paths are absolute."""

    job_id: str  # 17, or 17_2 in an array; the same over all requeues
    run_dir: str
    folder: str  # for the job's own files: logs, the copy of the code, tracebacks
    log: str  # what the first node prints, over all requeues
    nodes: str  # N or MIN:MAX
    revision: str  # of the code; ends in -dirty if it had changes; empty without git
    submitted: float  # seconds since the epoch

    def save(self) -> None:
        """Write it into the run's folder."""
        path = _path(Path(self.run_dir))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self), private=True)  # as all that is submitted

    @property
    def logs(self) -> list[Path]:
        """The logs of all nodes so far. torchrun decides which node has rank 0."""
        first = Path(self.log)
        if not first.name.endswith("_0_log.out"):
            return [first]
        return sorted(first.parent.glob(f"{glob.escape(self.job_id)}_*_log.out"))

    def errors(self, start: int | None) -> Path:
        """The folder for tracebacks of one start of the job, from 0; None: of the last one."""
        folder = Path(self.folder) / "errors" / self.job_id
        if start is None:
            start = max((int(path.name.removeprefix("start-")) for path in folder.glob("start-*")), default=0)
        return folder / f"start-{start}"


def load(run_dir: Path) -> JobRecord | None:
    """The record in a run's folder; None if the run was never in Slurm.

    Raises:
        OSError, ValueError: there is one, but it cannot be read.
    """
    known = read_json(_path(run_dir))
    if not known:
        return None
    texts = dict.fromkeys(["job_id", "run_dir", "folder", "log"], "")
    for name, example in {**texts, "submitted": 0.0}.items():
        if not alike(known.get(name), example):
            raise ValueError(f"{name} is {known.get(name)!r:.60}")
    values: dict[str, Any] = {field.name: known.get(field.name) for field in fields(JobRecord)}
    return JobRecord(**values)


def _path(run_dir: Path) -> Path:
    return run_dir / "slurm" / "job.json"

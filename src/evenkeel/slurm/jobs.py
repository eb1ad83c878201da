"""What Slurm says of jobs: squeue for those that it remembers, sacct for those of long ago."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .commands import SlurmError, slurm

ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)
"""States of a job that Slurm will not run any more (squeue(1), JOB STATE CODES)."""

WAITING = frozenset(
    ["CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"]
)
"""States in which a job has no process, and may have one later."""

UNKNOWN = "UNKNOWN"
"""Our own word for a job that Slurm has forgotten, and of which there is no accounting.

A task of an array that is cancelled while it waits is at once such a job.
"""


@dataclass(frozen=True)
class JobStatus:
    """How a job stands."""

    state: str
    """Slurm's long name of it, in capitals, or :data:`UNKNOWN`."""
    reason: str = ""
    """Why it is in that state, where Slurm has a reason."""
    nodes: str = ""
    """Those it runs or ran on, as Slurm abbreviates them: node[1-2]."""
    requeues: int | None = None
    """How often Slurm has started it again; None: only squeue knows that, and has forgotten the job."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ENDED

    @property
    def is_waiting(self) -> bool:
        """Whether it is yet to be started, for the first time or again."""
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
    """How jobs stand, all in one question to the controller and at most one to the accounting.

    Args:
        job_ids: as Slurm writes them, 17, or 17_2 in an array.

    Returns:
        One for each id.

    Raises:
        SlurmError: the controller cannot be asked.
    """
    asked = list(dict.fromkeys(job_ids))
    if not asked:
        return {}
    known = dict(_queued(asked))
    forgotten = [job_id for job_id in asked if job_id not in known]
    if forgotten:
        known |= dict(_accounted(forgotten))
    return {job_id: known.get(job_id, JobStatus(UNKNOWN)) for job_id in asked}


def _queued(job_ids: list[str]) -> Iterator[tuple[str, JobStatus]]:
    """Those that the controller remembers: all that wait or run, and what has ended in the last minutes."""
    columns = ["JobID", "ArrayJobID", "ArrayTaskID", "State", "Reason", "RestartCnt", "NodeList"]
    widths = ",".join(f"{column}:1024|" for column in columns)
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", f"--Format={widths}"]
    # a user's own SQUEUE_USERS or SQUEUE_PARTITION would hide jobs
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        lines = slurm(*command, env=plain).splitlines()
    except SlurmError as error:
        if "Invalid job id" in str(error):  # said where one is asked for, and it is forgotten
            return
        raise
    for line in lines:
        number, array, task, state, reason, requeues, nodes = (cell.strip() for cell in line.split("|")[:7])
        job_id = f"{array}_{task}" if task.isdecimal() else number
        if reason == "None" or state in ("CANCELLED", "COMPLETED"):
            reason = ""  # a job that was cancelled keeps the reason for which it had waited
        yield job_id, JobStatus(state, reason, nodes, int(requeues))


def _accounted(job_ids: list[str]) -> Iterator[tuple[str, JobStatus]]:
    """Those that the accounting knows; none where there is no accounting."""
    columns = "--format=JobID,State,NodeList"
    try:
        output = slurm("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}", columns)
    except SlurmError:
        return
    for line in output.splitlines():
        job_id, state, nodes = line.split("|")
        state, _, by = state.partition(" ")  # CANCELLED by 1000
        yield job_id, JobStatus(state, by and f"by user {by.removeprefix('by ')}", "" if "assigned" in nodes else nodes)

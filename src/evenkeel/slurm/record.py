"""What is known of a Slurm job, kept in its run's folder, for whoever looks at the run later."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..files import read_json, write_json
from ..records import alike


@dataclass(frozen=True)
class JobRecord:
    """The job that last worked on a run. It stands in ``RUN_DIR/slurm/job.json``."""

    job_id: str
    """Slurm's, of the form 17, or 17_2 in an array; the same over all requeues."""
    run_dir: str
    """Absolute."""
    folder: str
    """Where the job's own files are, absolute: logs, the copy of the code, tracebacks."""
    log: str
    """What its first node prints, over all requeues."""
    nodes: str
    """N or MIN:MAX."""
    gpus: int | None
    """Processes on each node; None: as many as GPUs were given."""
    revision: str
    """Of the code that runs; ends in -dirty if it had changes. Empty where there is no git."""
    train_args: tuple[str, ...]
    """Options of train.py."""
    submitted: float
    """Seconds since the epoch."""

    def save(self) -> None:
        """Write it into the run's folder."""
        path = _path(Path(self.run_dir))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self), private=True)  # the options of train.py

    @property
    def logs(self) -> list[Path]:
        """The logs of all nodes that there are. Which node has rank 0 is torchrun's choice."""
        first = Path(self.log)
        if not first.name.endswith("_0_log.out"):
            return [first]
        return sorted(first.parent.glob(f"{glob.escape(self.job_id)}_*_log.out"))

    def errors(self, requeues: int) -> Path:
        """The folder for tracebacks of one start of the job."""
        return Path(self.folder) / "errors" / self.job_id / f"start-{requeues}"

    @property
    def error_folders(self) -> Iterator[Path]:
        """Those of all starts, oldest first."""
        found = Path(self.folder, "errors", self.job_id).glob("start-*")
        return iter(sorted(found, key=lambda path: int(path.name.rpartition("-")[2])))


_NEEDED = ("job_id", "run_dir", "folder", "log")


def load(run_dir: Path) -> JobRecord | None:
    """The record in a run's folder, if it was ever in Slurm.

    Raises:
        OSError, ValueError: there is one, but it cannot be read.
    """
    known = read_json(_path(run_dir))
    if not known:
        return None
    if not all(alike(known.get(name), "") for name in _NEEDED):
        raise ValueError(f"{', '.join(_NEEDED)} must be texts in an object")
    values: dict[str, Any] = {field.name: known.get(field.name) for field in fields(JobRecord)}
    args, submitted = known.get("train_args", []), known.get("submitted", 0.0)
    if not alike(args, [""]) or not alike(submitted, 0.0):
        raise ValueError("train_args must be a list of texts, and submitted a number")
    return JobRecord(**values | {"train_args": tuple(args), "submitted": submitted})


def _path(run_dir: Path) -> Path:
    return run_dir / "slurm" / "job.json"

"""The progress of a job, from the lines of its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ...run.records import Tail, read_facts
from .faults import Fault


class Done(NamedTuple):
    """A fault that happened."""

    fault: Fault
    time: float  # seconds since the epoch
    step: int  # the last step in metrics.jsonl at that time


class Progress(Tail):
    """The records that a run writes from now on; older ones are skipped.

    Args:
        run_dir: the run's folder, which need not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / "metrics.jsonl")
        self.run_dir = run_dir
        self.update()
        self.reset()

    def reset(self) -> None:
        """Start without records."""
        self.records: list[dict[str, Any]] = []

    def take(self, record: dict[str, Any]) -> None:
        """Add a record."""
        self.records.append(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind, oldest first."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def step(self) -> int:
        """The step of the last record."""
        return int(self.records[-1]["step"]) if self.records else 0

    @property
    def status(self) -> dict[str, Any]:
        """The facts in status.json, none if there is no such file."""
        return read_facts(self.run_dir / "status.json")[0]

    @property
    def finished(self) -> bool:
        """Whether the run has done its last step."""
        return self.status.get("state") == "finished"

    def first_step_after(self, fault: Done) -> float | None:
        """The time of the first training record after a fault, in seconds since the epoch; None: not yet.

        After a fault that ends an attempt only the steps of the next attempt count.
        """
        moment = fault.time
        if fault.fault.restarts:
            moment = next((record["time"] for record in self.of("start") if record["time"] > moment), float("inf"))
        return next((record["time"] for record in self.of("train") if record["time"] > moment), None)

    def recovered(self, fault: Done) -> bool:
        """Whether a step was done since a fault. With a large --log-every status.json shows it before a record does."""
        if self.first_step_after(fault) is not None:
            return True
        if fault.fault.restarts:
            return self.status.get("fruitless") == 0 and any(it["time"] > fault.time for it in self.of("start"))
        return bool(self.status.get("step", 0) > fault.step)

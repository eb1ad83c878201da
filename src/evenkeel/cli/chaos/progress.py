"""What a job has done so far, from the lines of its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ...run.records import read_facts
from ..tail import Tail
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
        """Keep a record."""
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

    def first_step_after(self, moment: float, *, restarted: bool) -> float | None:
        """The time of the first training record after a moment, both in seconds since the epoch; None: not yet.

        Args:
            moment: that moment.
            restarted: count only the steps of an attempt that began after it.
        """
        if restarted:
            moment = next((record["time"] for record in self.of("start") if record["time"] > moment), float("inf"))
        return next((record["time"] for record in self.of("train") if record["time"] > moment), None)

    def recovered(self, moment: float, step: int, *, restarted: bool) -> bool:
        """Whether a step was done since a moment and the step told of then, as in `first_step_after`.

        With a large --log-every status.json shows it earlier than a record does.
        """
        if self.first_step_after(moment, restarted=restarted) is not None:
            return True
        if restarted:
            return self.status.get("fruitless") == 0 and any(record["time"] > moment for record in self.of("start"))
        return bool(self.status.get("step", 0) > step)

"""How far a run has come, read from its folder while it runs: metrics.jsonl and status.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..records import read_facts, read_record


class Progress:
    """The records that a run writes from now on; those of an earlier time are skipped.

    Args:
        run_dir: the run's folder, which need not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / "metrics.jsonl"
        self.records: list[dict[str, Any]] = []
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def update(self) -> None:
        """Read what is new."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):  # else it is still being written
                self._offset += len(line)
                if record := read_record(line):
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
        """What status.json says, nothing if there is none."""
        return read_facts(self.run_dir / "status.json")[0]

    @property
    def finished(self) -> bool:
        """Whether the run is done."""
        return self.status.get("state") == "finished"

    def first_step_after(self, moment: float, *, restarted: bool) -> float | None:
        """When the first step after a moment was told of.

        Args:
            moment: seconds since the epoch.
            restarted: count only steps of an attempt that began after it.

        Returns:
            Seconds since the epoch; None if there is no such step yet.
        """
        if restarted:
            starts = [record["time"] for record in self.of("start") if record["time"] > moment]
            if not starts:
                return None
            moment = starts[0]
        return next((record["time"] for record in self.of("train") if record["time"] > moment), None)

    def recovered(self, moment: float, step: int, *, restarted: bool) -> bool:
        """Whether a step was finished after a moment; also seen where few steps have a line in metrics.jsonl.

        Args:
            moment: seconds since the epoch.
            step: the last step told of at that moment.
            restarted: count only an attempt that began after it.
        """
        if self.first_step_after(moment, restarted=restarted) is not None:
            return True
        status = self.status
        if restarted:
            begun = any(record["time"] > moment for record in self.of("start"))
            return begun and status.get("fruitless") == 0
        return bool(status.get("step", 0) > step)

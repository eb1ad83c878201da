"""--csv: every number that a run has measured, as it stands in metrics.jsonl."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from typing import TextIO

from ...run.records import read_records
from .history import History, values_of

HEAD = ("run", "attempt", "kind", "step", "time", "name", "value")
"""A row for each value. `time` is in seconds since 1970; `value` is empty if it was not finite."""


def write_csv(histories: Sequence[History], file: TextIO) -> None:
    """Write the rows of all runs. A step that was done again is in it again, under another attempt."""
    writer = csv.writer(file)
    writer.writerow(HEAD)
    for history in histories:
        writer.writerows(_rows(history))


def _rows(history: History) -> Iterator[tuple[object, ...]]:
    attempt = 0
    for record in read_records(history.path / "metrics.jsonl"):
        attempt += record["kind"] == "start"
        for name, value in values_of(record).items():
            yield history.name, attempt, record["kind"], record["step"], record["time"], name, value

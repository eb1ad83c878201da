"""`compare --metrics`: the last and the best metrics of several runs, and how they differ from those of the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.display import aligned
from ..common.errors import Refusal
from ..run.checkpoint import Checkpoints
from ..run.records import read_records, values_of

Values = dict[str, "float | None"]
"""By full name; None: not finite."""


@dataclass(frozen=True)
class Measured:
    """What a run has measured."""

    step: int
    """Of its last record with values."""
    last: Values
    best: Values
    """The evaluation at its best step; empty without one."""
    by: str = ""
    """What decides which step is the best: "highest test/accuracy"."""
    best_step: int | None = None


def measured(run: Path) -> Measured:
    """What metrics.jsonl says. Steps that were lost or done again count as the last attempt did them.

    Raises:
        Refusal: the run has no metrics.
    """
    steps: dict[int, dict[str, Values]] = {}  # by step and kind
    for record in read_records(run / "metrics.jsonl"):
        if record["kind"] == "start":
            steps = {step: kinds for step, kinds in steps.items() if step <= record["step"]}
        elif values := values_of(record):
            steps.setdefault(record["step"], {}).setdefault(record["kind"], {}).update(values)
    if not steps:
        raise Refusal(f"{run}: has no metrics so far; name runs that have logged some")
    last: Values = {}
    for kind in ("eval", "log", "train"):
        for step in sorted(steps):
            last |= steps[step].get(kind, {})
    evaluations = {step: kinds["eval"] for step, kinds in steps.items() if "eval" in kinds}
    newest = Checkpoints(run / "checkpoints", 1).newest_manifest()
    if not (newest and newest.best_by):
        return Measured(max(steps), last, {})
    name, mode = newest.best_by
    found = {step: value for step, values in evaluations.items() if (value := values.get(name)) is not None}
    if not found:
        return Measured(max(steps), last, {})
    sign = 1 if mode == "max" else -1
    best = max(found, key=lambda step: (sign * found[step], -step))
    return Measured(max(steps), last, evaluations[best], f"{'highest' if mode == 'max' else 'lowest'} {name}", best)


def table(runs: Sequence[Path]) -> list[str]:
    """A line for each metric, a column for each run: its value and, from the second run on, its difference."""
    found = [measured(run) for run in runs]
    rows = [["metric", "at", *map(str, runs)]]
    rows.append(["step", "last", *(str(it.step) for it in found)])
    if any(it.by for it in found):
        rows.append(["step", "best", *("-" if it.best_step is None else str(it.best_step) for it in found)])
    for name, part, values in _lines(found):
        rows.append([name, part, *(_cell(value, values[0], number) for number, value in enumerate(values))])
    lines = aligned(rows)
    if deciders := list(dict.fromkeys(it.by for it in found if it.by)):
        lines.append(f"best: at the step with the {' or the '.join(deciders)}")
    return lines


def as_json(runs: Sequence[Path]) -> dict[str, Any]:
    """The same as JSON: lists have an item for each run; null: it has none, or it is not finite."""
    found = [measured(run) for run in runs]
    metrics: dict[str, dict[str, Any]] = {}
    for name, part, values in _lines(found):
        numbers = [None if value == "" else value for value in values]
        differences = [_difference(value, numbers[0]) for value in numbers]
        metrics.setdefault(name, {})[part] = {"values": numbers, "differences": differences}
    return {
        "runs": [str(run) for run in runs],
        "steps": [it.step for it in found],
        "best_steps": [it.best_step for it in found],
        "best_by": [it.by or None for it in found],
        "metrics": metrics,
    }


def _lines(found: list[Measured]) -> list[tuple[str, str, list[Any]]]:
    """(metric, "last" or "best", a value for each run; "": the run has none)."""
    names = dict.fromkeys(name for it in found for name in it.last)
    lines = []
    for name in names:
        lines.append((name, "last", [it.last.get(name, "") for it in found]))
        if any(name in it.best for it in found):
            lines.append((name, "best", [it.best.get(name, "") for it in found]))
    return lines


def _cell(value: Any, first: Any, number: int) -> str:
    if value == "":
        return "-"
    difference = _difference(value, first) if number else None
    shown = "nan" if value is None else f"{value:.5g}"
    return shown if difference is None else f"{shown} ({difference:+.3g})"


def _difference(value: Any, first: Any) -> float | None:
    both = isinstance(value, (int, float)) and isinstance(first, (int, float))
    return value - first if both and math.isfinite(value - first) else None

"""Names in messages and files: metrics as SET/METRIC (`train/loss`, `test/accuracy`), ranks, parameters, types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

V = TypeVar("V")

TRAIN, VALIDATION, TEST = "train", "validation", "test"
"""The sets of samples that something is measured on. A task may name other sets for its evaluation."""


def in_set(part: str, name: str) -> str:
    """The full name of a metric that a task has given any name."""
    return name if name.startswith(f"{part}/") else f"{part}/{name}"


def full_name(part: str, name: str) -> str:
    """A reported metric's name with its set before it, unless it has one. Files of version 0.1.0 hold bare names."""
    return name if "/" in name else f"{part}/{name}"


def named(part: str, values: Mapping[str, V]) -> dict[str, V]:
    """Values by their full names."""
    return {full_name(part, name): value for name, value in values.items()}


def shown(values: Mapping[str, Any]) -> str:
    """Metrics in a line; None is one that was not finite."""
    texts = {k: f"{v:.4f}" if isinstance(v, int | float) else str(v or "nan") for k, v in values.items()}
    return "  ".join(f"{name} {text}" for name, text in texts.items())


def progress(step: int, total: int | None, *facts: str) -> str:
    """A line about a step: how far the run is, and what there is to say."""
    return "  ".join([f"step {step}/{total or '?'}", *filter(None, facts)])


def speeds(values: Mapping[str, Any], left: timedelta | None = None, goodput: float | None = None) -> str:
    """How fast a run is, from the figures of a training line: "504 samples/s  ETA 0:00:57  data wait 3 %"."""
    known = {name: values.get(f"{TRAIN}/{name}") for name in ("samples_per_s", "tokens_per_s", "mfu", "data_wait")}
    rates = {"samples/s": known["samples_per_s"], "tokens/s": known["tokens_per_s"]}
    shares = {"MFU": known["mfu"], "data wait": known["data_wait"], "goodput": goodput}
    words = [f"{rate:,.0f} {unit}" for unit, rate in rates.items() if rate is not None]
    words += [] if left is None else [f"ETA {left}"]
    return "  ".join([*words, *(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share is not None)])


def name_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5"."""
    runs = groupby(enumerate(sorted(ranks)), lambda it: it[1] - it[0])  # consecutive ones: the same difference
    spans = [[rank for _, rank in run] for _, run in runs]
    text = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def count_ranks(number: int) -> str:
    """How many ranks, in words."""
    return f"{number} rank{'s' * (number != 1)}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names in a line, only the first few of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def kind_of(value: Any) -> str:
    """The type of a value, with an article: "a list"."""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"

"""Names in messages and files: metrics as SET/METRIC (`train/loss`, `test/accuracy`), ranks, tensors, types, files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

V = TypeVar("V")

Kind = Literal["checkpoint", "snapshot"]
"""Of a checkpoint: a planned one, or one of a job that was stopped or failed."""

TRAIN, VALIDATION, TEST = "train", "validation", "test"
"""The sets of samples that something is measured on. A task may name other sets for its evaluation."""

BIT_FLIPS = "EVENKEEL_BIT_FLIPS"
"""The environment variable that names the file of `run.bit_flips`."""


def in_set(part: str, name: str) -> str:
    """The full name of a metric of a task."""
    return name if name.startswith(f"{part}/") else f"{part}/{name}"


def full_name(part: str, name: str) -> str:
    """A reported metric's name with its set before it, unless it has one. Files of version 0.1.0 hold bare names."""
    return name if "/" in name else f"{part}/{name}"


def named(part: str, values: Mapping[str, V]) -> dict[str, V]:
    """Values by their full names."""
    return {full_name(part, name): value for name, value in values.items()}


def figures(values: Mapping[str, Any]) -> list[str]:
    """Metrics as text, each with its name; None is one that was not finite."""
    texts = {k: f"{v:.4f}" if isinstance(v, int | float) else str(v or "nan") for k, v in values.items()}
    return [f"{name} {text}" for name, text in texts.items()]


def shown(values: Mapping[str, Any]) -> str:
    """Metrics in a line."""
    return "  ".join(figures(values))


def progress(step: int, total: int | None, *facts: str) -> str:
    """A line about a step: how far the run is, and some facts."""
    return "  ".join([f"step {step}/{total or '?'}", *filter(None, facts)])


def eta(seconds: float | None) -> str:
    """The remaining time: "ETA 0:00:57"; empty if it is not known."""
    return "" if seconds is None else f"ETA {timedelta(seconds=round(seconds))}"


def rates(values: Mapping[str, Any]) -> list[str]:
    """The speed of a run, from a training record: ["504 samples/s"]."""
    known = {unit: values.get(f"{TRAIN}/{unit}_per_s") for unit in ("samples", "tokens")}
    return [f"{rate:,.0f} {unit}/s" for unit, rate in known.items() if rate is not None]


def time_spent(values: Mapping[str, Any], goodput: float | None) -> list[str]:
    """How a run spends its time, from a training record: ["data wait 3 %", "goodput 71 %"]."""
    known = {"MFU": values.get(f"{TRAIN}/mfu"), "data wait": values.get(f"{TRAIN}/data_wait"), "goodput": goodput}
    return [f"{name} {100 * part:.0f} %" for name, part in known.items() if part is not None]


def in_epoch(epoch: int, epochs: int | None) -> str:
    """The epoch, from 1: "epoch 3/20"; without a total if the run ends in mid-epoch."""
    return f"epoch {epoch}" + (f"/{epochs}" if epochs is not None else "")


def name_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def spans(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs = groupby(enumerate(sorted(numbers)), lambda it: it[1] - it[0])  # consecutive ones: the same difference
    found = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in found)


def count_ranks(number: int) -> str:
    """How many ranks, in words."""
    return f"{number} rank{'s' * (number != 1)}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names in a line, at most the first few."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def kind_of(value: Any) -> str:
    """The type of a value, with an article: "a list"."""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def owner(name: str) -> str:
    """Whose file of code this is: "engine", "package", "Python" or "user", which the built-in tasks are too."""
    engine = Path(__file__).parents[1]
    is_task = name.startswith(f"{engine / 'tasks'}{os.sep}") and not name.endswith("registry.py")
    is_task |= name == str(engine / "training" / "classification.py")
    if name.startswith(("<frozen", f"{engine}{os.sep}")) and not is_task:
        return "engine"
    if {"site-packages", "dist-packages"} & {*Path(name).parts}:
        return "package"
    return "Python" if name.startswith(sysconfig.get_path("stdlib")) else "user"

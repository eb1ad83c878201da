"""What measured values are called wherever they are written or shown: SET/METRIC, `train/loss` or `test/accuracy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

V = TypeVar("V")

TRAIN, TEST = "train", "test"
SETS = (TRAIN, TEST)
"""The sets of samples that something is measured on."""


def full_name(part: str, name: str) -> str:
    """A name of a task's, or of a file of version 0.1.0, with the set before it; a full one as it is."""
    return name if name.startswith(tuple(f"{it}/" for it in SETS)) else f"{part}/{name}"


def named(part: str, values: Mapping[str, V]) -> dict[str, V]:
    """Values by their full names."""
    return {full_name(part, name): value for name, value in values.items()}


def shown(values: Mapping[str, float]) -> str:
    """Metrics in a line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())

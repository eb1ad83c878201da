"""Versions of packages as numbers, which can be compared."""

from __future__ import annotations

import re

TORCH_FOR_SHARDING = (2, 9)
"""The oldest torch whose FSDP2 takes another reduce-scatter, as --shard on needs."""


def numbers(version: str) -> tuple[int, ...]:
    """2.15.0+cu130 as (2, 15, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))

"""Sides of a benchmark that take turns in one process group."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def in_turn(
    loops: Mapping[Any, Iterator[object]], turns: int, device: torch.device, steps: int = 1, warm_up: int = 3
) -> dict[Any, list[float]]:
    """The seconds of each turn, by side.

    Args:
        loops: by side; one step for each next().
        turns: of each side that are measured.
        device: to wait for at the end of a turn.
        steps: of a turn.
        warm_up: turns of one step before, for allocators and DDP's buckets.
    """
    seconds: dict[Any, list[float]] = {side: [] for side in loops}
    for turn in range(warm_up + turns):
        # so that none always comes after the same other one
        first = turn % len(loops)
        for side in itertools.islice(itertools.cycle(loops), first, first + len(loops)):
            begun = time.perf_counter()
            for _ in range(steps if turn >= warm_up else 1):
                next(loops[side])
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= warm_up:
                seconds[side].append(time.perf_counter() - begun)
    return seconds

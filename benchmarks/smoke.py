#!/usr/bin/env python3
"""Whether `train.py` has become slower than a loop written by hand: two workloads of peers.py, in two minutes.

    make bench-smoke

Runs bare DDP twice and Evenkeel once a round, for as many rounds as the time allows, and looks at ratios only. Exits
with 1 if the median of one is outside its band by more than the noise, which is what bare DDP differs from itself.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro
from peers import SideName, WorkloadName, make_images, ratios, run, spread

SIDES: list[SideName] = ["bare", "bare again", "evenkeel"]
STEPS: dict[WorkloadName, int] = {"digits": 100, "jpegs": 40}
IMAGES = 640

BANDS: dict[tuple[WorkloadName, str], tuple[float, float]] = {
    # Above: slower than bare DDP. Far below: one of the two does not do its work.
    ("digits", "step"): (0.3, 1.0),
    ("digits", "cpu"): (0.3, 1.0),
    ("digits", "first"): (0.5, 1.1),
    ("jpegs", "step"): (0.3, 1.0),
}
"""(workload, field of a run) -> least and greatest ratio of Evenkeel to bare DDP."""

UNCLEAR = 1.5
"""If bare DDP differs from itself by this factor, the machine is too busy to tell anything."""


@dataclass(frozen=True)
class Options:
    """Look for a loss of speed."""

    seconds: float = 105.0
    """No round is begun that would end later. There are two in any case."""
    slow: float = 0.0
    """Seconds that Evenkeel waits in each step, to see this fail."""


def judge(ours: Sequence[float], itself: Sequence[float], band: tuple[float, float]) -> str:
    """What is wrong with the ratios; empty if nothing is.

    Args:
        ours: of Evenkeel to bare DDP, by round.
        itself: of bare DDP to itself.
        band: least and greatest that the median of the first may be, but for the noise.
    """
    noise = max(max(ratio, 1 / ratio) for ratio in itself)
    if noise > UNCLEAR:
        return f"cannot tell: bare DDP differs from itself by a factor of {noise:.2f}; try again on a quiet machine"
    least, greatest = band[0] / noise, band[1] * noise
    ratio = median(ours)
    if least <= ratio <= greatest:
        return ""
    return f"{ratio:.2f} is outside {band[0]:.2f} .. {band[1]:.2f} by more than the noise, a factor of {noise:.2f}"


def main(options: Options) -> int:
    """Measure, print, judge."""
    begun, longest, runs, number = time.monotonic(), 0.0, [], 0
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder)
        make_images(images, IMAGES)
        while number < 2 or time.monotonic() - begun + longest < options.seconds:
            round_begun = time.monotonic()
            for workload, steps in STEPS.items():
                for side in [*SIDES[number % 3 :], *SIDES[: number % 3]]:
                    runs.append(run(side, workload, number, steps, 2, images, options.slow))
            longest = max(longest, time.monotonic() - round_begun)
            number += 1
    wrong = 0
    for (workload, metric), band in BANDS.items():
        mine = [each for each in runs if each.workload == workload]
        ours, itself = (ratios(mine, side, ["bare"], metric) for side in ("evenkeel", "bare again"))
        complaint = judge(ours, itself, band)
        wrong += bool(complaint)
        told = f"{workload}, {metric}: Evenkeel / bare {spread(ours)}, bare / bare {spread(itself)}"
        print(f"{told}: {complaint or 'good'}", flush=True)
    print(f"{number} rounds in {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))

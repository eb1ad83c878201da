"""How far apart the ranks are, from ranks.jsonl. Read as a stream: a long run on many ranks has many numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...run.records import read_records

LINE = {"step": 0, "arrival": [0.0], "data_wait": [0.0]}
"""Fields of each line. The host names are in an attempt's first line, in older versions in each line."""

Numbers = npt.NDArray[np.float64]


@dataclass
class Ranks:
    """Of each rank the mean over all lines, in seconds per step; of each line the spread over the ranks.

    Attributes:
        hosts: of each rank, as last seen.
        arrival: mean time from the step's start until the rank is ready for its first reduction.
        data_wait: mean time it waits for data.
        steps: of the lines; `spread` has the least, median and greatest arrival of each.
    """

    hosts: list[str] = field(default_factory=list)
    arrival: Numbers = field(default_factory=lambda: np.zeros(0))
    data_wait: Numbers = field(default_factory=lambda: np.zeros(0))
    steps: list[int] = field(default_factory=list)
    spread: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def slowest(self) -> int:
        """The rank that arrives last, on average."""
        return int(np.argmax(self.arrival))


def read_ranks(path: Path) -> Ranks | None:
    """The contents of a ranks.jsonl; None if there is none, or it is empty."""
    found = Ranks()
    sums, lines = np.zeros((2, 0)), np.zeros(0)
    for line in read_records(path, example=LINE):
        number = len(line["arrival"])
        if not 0 < number == len(line["data_wait"]):
            continue
        if (more := number - lines.size) > 0:  # the run goes on with more ranks
            sums, lines = np.pad(sums, ((0, 0), (0, more))), np.pad(lines, (0, more))
        sums[:, :number] += line["arrival"], line["data_wait"]
        lines[:number] += 1
        while found.steps and found.steps[-1] >= line["step"]:  # it is done again
            found.steps.pop(), found.spread.pop()
        low, middle, high = np.percentile(line["arrival"], (0, 50, 100))
        found.steps.append(line["step"])
        found.spread.append((float(low), float(middle), float(high)))
        hosts = [*line.get("hosts", found.hosts), *["?"] * number][:number]
        found.hosts = [*hosts, *found.hosts[number:]]
    if not found.steps:
        return None
    found.arrival, found.data_wait = sums / lines
    return found

"""Late ranks: writes the rows of `training.arrivals` to ranks.jsonl, and names ranks that are late."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low

from ..common.files import append_json
from ..common.repeats import Repeats
from ..training.arrivals import BACKWARD, FORWARD, LOADING, MICRO_BATCHES, SAMPLES, STEPS

log = logging.getLogger(__name__)

RATIO = 1.25
"""A rank is late if it takes this many times as long as the median rank ..."""
DEVIATIONS = 3.0
"""... and is beyond the median by this many median absolute deviations ..."""
TIMES = 4
"""... in so many consecutive spans; as many in time end it."""
SPAN = 4.0
"""Minimum seconds of a span. Shorter ones show effects of the machine's scheduler (docs/live.md)."""

WORDS = {LOADING: "data", FORWARD: "forward", BACKWARD: "backward"}
"""Names of a step's parts."""

Row = Sequence[float]
"""Of one rank; see the columns of `training.arrivals`."""


def late(rows: Sequence[Row], units: Sequence[int] = (SAMPLES, MICRO_BATCHES)) -> dict[int, tuple[float, str]]:
    """Ranks that are late in one span: how many times later than the median, and in which part of the step.

    Late per micro-batch and per sample: either alone misleads if some micro-batches are smaller, because a small one
    takes less time, but more per sample. With unequal shares (--shares) late per step. The median absolute deviation
    is a scale that the late ranks themselves do not move (Hampel, "The Influence Curve and Its Role in Robust
    Estimation", 1974). Idle ranks do not count.
    """
    busy = [rank for rank, row in enumerate(rows) if row[MICRO_BATCHES]]
    found: list[dict[int, float]] = []
    for unit in units if busy else ():
        taken = {rank: sum(rows[rank][part] for part in WORDS) / rows[rank][unit] for rank in busy}
        middle = median_low(taken.values())
        spread = median_low(abs(each - middle) for each in taken.values())
        least = max(RATIO * middle, middle + DEVIATIONS * spread)
        found.append({rank: each / middle for rank, each in taken.items() if each > least > 0})
    *others, last = found or [{}]
    return {rank: (it, _part(rows, busy, rank)) for rank, it in last.items() if all(rank in each for each in others)}


def _part(rows: Sequence[Row], busy: Sequence[int], rank: int) -> str:
    """The part in which a rank loses most against the median rank."""

    def lost(part: int) -> float:
        each = {other: rows[other][part] / rows[other][MICRO_BATCHES] for other in busy}
        return each[rank] - median_low(each.values())

    return WORDS[max(WORDS, key=lost)]


class Stragglers:
    """Writes ranks.jsonl, and logs once when a rank becomes late and once when that is over. On rank 0 only.

    Args:
        path: the file.
        hosts: of all ranks.
        shares: --shares.
    """

    def __init__(self, path: Path, hosts: Sequence[str], shares: str = "equal") -> None:
        self.path, self.hosts, self.shares = path, hosts, shares
        self.named: dict[int, str] = {}
        """A text for each late rank."""
        self._hosts_written, self._failures = False, Repeats()
        self._counts = [0] * len(hosts)  # consecutive spans: late, or below 0 in time
        self._rows = [[0.0] * (STEPS + 1) for _ in hosts]
        self._since = (0, time.monotonic())

    def take(self, step: int, rows: Sequence[Row]) -> None:
        """Take the rows of an interval that ends with a step."""
        parts = {name: [_mean(row[part], row[MICRO_BATCHES]) for row in rows] for part, name in WORDS.items()}
        record = {
            "step": step,
            "time": round(time.time(), 3),
            "arrival": [round(sum(each), 6) for each in zip(*parts.values(), strict=True)],
            "data_wait": [_mean(row[LOADING], row[STEPS]) for row in rows],
        }
        hosts = {} if self._hosts_written else {"hosts": list(self.hosts)}
        try:
            append_json(self.path, record | parts | hosts)
            self._hosts_written = True
        except OSError as error:
            self._failures.log(log, f"{self.path.name}: {error}; training goes on without its lines")
        self._rows = [[a + b for a, b in zip(*both, strict=True)] for both in zip(self._rows, rows, strict=True)]
        if time.monotonic() - self._since[1] >= SPAN:
            self._judge(step)
            self._rows = [[0.0] * (STEPS + 1) for _ in self.hosts]
            self._since = step, time.monotonic()

    def _judge(self, step: int) -> None:
        found = late(self._rows) if self.shares == "equal" else late(self._rows, (STEPS,))
        for rank, count in enumerate(self._counts):
            self._counts[rank] = max(0, count) + 1 if rank in found else min(0, count) - 1
            if self._counts[rank] >= TIMES and rank in found:
                ratio, part = found[rank]
                text = f"rank {rank} on {self.hosts[rank]} arrives {ratio:.1f} times later than the median, in {part}"
                if rank not in self.named:
                    log.warning("%s (steps %d to %d); all ranks wait for it", text, self._since[0] + 1, step)
                self.named[rank] = text
            elif self._counts[rank] <= -TIMES and self.named.pop(rank, ""):
                log.warning("rank %d on %s is in time again, by step %d", rank, self.hosts[rank], step)


def _mean(total: float, number: float) -> float:
    return round(total / number, 6) if number else 0.0

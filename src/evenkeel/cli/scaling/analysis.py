"""From the files of short runs to a table: speed-up, efficiency, losses by cause, and a prediction.

Communication is the time in which a rank only communicates: a collective is under way and the rank computes nothing
beside it (for the overlap see Li et al., "PyTorch Distributed", VLDB 2020). The last rank to arrive waits for no other,
so the smallest time of all ranks is the exchange itself. The additional time of the others is imbalance.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...run.records import read_records

LOSSES = ("data", "communication", "imbalance", "other")
"""Waiting for data; exchange that does not overlap computation; waiting for slower ranks; all else: a smaller share
does not take proportionally less time, cores and memory are shared, each rank does the whole optimizer step."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Sample:
    """A run: samples per second, and seconds of waiting per step and rank."""

    speed: float
    data: float = 0.0
    communication: float = 0.0
    imbalance: float = 0.0


@dataclass(frozen=True)
class Row:
    """A number of ranks in a table."""

    ranks: int
    batch: int
    speed: float
    speedup: float
    efficiency: float
    lost: dict[str, float]
    """By :data:`LOSSES`, as shares of a step; with the efficiency they add up to 1."""


def measure(run_dir: Path, warm_up: int, steps: int) -> Sample:
    """A run's speed between two steps, and its waits; those of collectives from the traces of --profile after them."""
    timed = [it for it in read_records(run_dir / "metrics.jsonl") if it["kind"] == "train"]
    timed = [it for it in timed if warm_up <= it["step"] <= steps]
    speed = statistics.median(it["train/samples_per_s"] for it in timed[1:])
    done = timed[-1]["step"] - timed[0]["step"]
    data = (timed[-1]["spent"].get("data", 0.0) - timed[0]["spent"].get("data", 0.0)) / done  # rank 0's
    if waited := _data_waits(run_dir / "ranks.jsonl", warm_up, steps):
        data = statistics.mean(waited)
    waits = [exposed(json.loads(path.read_bytes())["traceEvents"]) for path in run_dir.glob("profile/rank-*.json")]
    least = min(waits, default=0.0)
    return Sample(speed, data, least, statistics.mean(waits) - least if waits else 0.0)


def _data_waits(path: Path, warm_up: int, steps: int) -> list[float]:
    """Of all ranks, if the run has written them."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [seconds for it in lines if warm_up < it["step"] <= steps for seconds in it["data_wait"]]


def exposed(events: Sequence[dict[str, Any]]) -> float:
    """Seconds per step in which a rank's trace shows a collective and no computation beside it."""
    spans = [it for it in events if it.get("ph") == "X"]
    steps = [it for it in spans if it.get("cat") == "user_annotation" and it["name"].startswith("step ")]
    steps = sorted(steps, key=lambda it: float(it["ts"]))[1:] or steps  # the first includes the profiler's own start
    if kernels := [it for it in spans if it.get("cat") == "kernel"]:
        collective = [it for it in kernels if it["name"].startswith("nccl")]
        computing = [it for it in kernels if not it["name"].startswith("nccl")]
    else:
        threads = {it["tid"] for it in steps}
        collective = [it for it in spans if it["name"].startswith("gloo:")]
        ops = [it for it in spans if it.get("cat") == "cpu_op" and it["tid"] in threads]
        computing = [it for it in ops if not it["name"].startswith("c10d::")]
    alone = only(_spans(collective), _spans(computing), _spans(steps))
    return alone / 1e6 / max(1, len(steps))


def _spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    return [(it["ts"], it["ts"] + it["dur"]) for it in events]


def only(these: list[Span], without: list[Span], within: list[Span]) -> float:
    """Total length of some spans, inside of others and outside of yet others.

    >>> only([(0, 4), (2, 6)], without=[(1, 3)], within=[(0, 5)])
    3.0
    """
    edges = [(at, kind, step) for kind, some in enumerate((these, without, within)) for a, b in some
             for at, step in ((a, 1), (b, -1))]  # fmt: skip
    total, last, open_ = 0.0, 0.0, [0, 0, 0]
    for at, kind, step in sorted(edges):
        if open_[0] and not open_[1] and open_[2]:
            total += at - last
        open_[kind] += step
        last = at
    return total


def middle(samples: Sequence[Sample]) -> Sample:
    """The median of each number over the rounds."""
    return Sample(*map(statistics.median, zip(*map(astuple, samples), strict=True)))


def table(found: dict[int, tuple[int, Sample]], weak: bool) -> list[Row]:
    """A row for each number of ranks, compared with the smallest.

    Args:
        found: ranks -> (global batch, its run).
        weak: the batch of a rank is fixed; otherwise the global batch is.
    """
    least = min(found)
    base = found[least][1]
    rows = []
    for ranks, (batch, run) in sorted(found.items()):
        times = ranks / least
        part = 1 if weak else 1 / times  # of the first run's seconds per step, in the ideal case
        seconds, speedup = batch / run.speed, run.speed / base.speed
        share = 1 - speedup / times
        lost = dict.fromkeys(LOSSES, 0.0)
        for name in LOSSES[:3]:
            lost[name] = max(0.0, getattr(run, name) - getattr(base, name) * part) / seconds
        if (known := sum(lost.values())) > max(0.0, share):  # measured in other steps than the speed
            lost = {name: value * max(0.0, share) / known for name, value in lost.items()}
        lost["other"] = share - sum(lost.values())
        rows.append(Row(ranks, batch, run.speed, speedup, speedup / times, lost))
    return rows


def serial_share(rows: Sequence[Row], weak: bool) -> float:
    """The share of the work that does not get faster with more ranks, by least squares, 0 .. 1.

    By Amdahl's law (1967) a fixed work on n times the ranks is 1 / (s + (1 - s) / n) times as fast; by Gustafson's
    (1988) a work that grows with the ranks n - s (n - 1) times.
    """
    above = below = 0.0
    for row in rows[1:]:
        n, speedup = row.ranks / rows[0].ranks, row.speedup
        x, y = (n - 1, n - speedup) if weak else (1 - 1 / n, 1 / speedup - 1 / n)
        above, below = above + x * y, below + x * x
    return min(1.0, max(0.0, above / below)) if below else 0.0


class Prediction(NamedTuple):
    """Of the speed-up at twice the largest number of ranks."""

    ranks: int
    speedup: float
    serial_share: float
    law: str
    measured: bool = False


def predicted(rows: Sequence[Row], weak: bool) -> Prediction:
    """The prediction of the law for this kind of work."""
    ranks, s = 2 * rows[-1].ranks, serial_share(rows, weak)
    n = ranks / rows[0].ranks
    if weak:
        return Prediction(ranks, n - s * (n - 1), s, "Gustafson")
    return Prediction(ranks, 1 / (s + (1 - s) / n), s, "Amdahl")

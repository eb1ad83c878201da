"""`--profile FIRST:LAST`: a Chrome trace of some steps on each rank, and the operators that take the most time.

torch.profiler records; this file says when, and adds the facts by which `python -m evenkeel profile` puts traces of
several nodes on one clock. Imported only with the option; outside the window it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..common.display import near, say
from ..common.files import unused, write_atomically
from ..common.phases import CHECKPOINT, activity
from ..config import Config, profile_window
from ..data.sampler import Step
from ..distributed.world import World
from ..training.state import State

log = logging.getLogger(__name__)

FOLDER = "profile"
"""In the run directory."""

FACTS = "evenkeel"
"""The key of our facts in a trace: rank, world_size, host, steps, clock_ahead_ns, session."""

ROUNDS = 15
"""Of the measurement of clocks, a few milliseconds in all."""

SHOWN, KEPT = 10, 50
"""Operators on the screen and in operators.txt."""

EVENTS = 1_000_000
"""Allocations that --memory-snapshot keeps."""


def profiled(steps: Iterator[Step], config: Config, state: State, world: World, run_dir: Path) -> Iterator[Step]:
    """The same steps; those of --profile are recorded."""
    window = profile_window(config)
    if state.step >= window.stop and world.rank == 0:
        say(f"evenkeel: --profile {config.profile}: nothing to trace, the run is at step {state.step} already")
    return Profiler(window, config.memory_snapshot, world, run_dir).around(steps, state)


class Profiler:
    """Records this rank's part of the window, and writes it into the run directory.

    Args:
        window: numbers of steps, counted from 0 over the whole run.
        memory: with a snapshot of the GPU's memory.
    """

    def __init__(self, window: range, memory: bool, world: World, run_dir: Path) -> None:
        self.window, self.memory, self.world, self.folder = window, memory, world, run_dir / FOLDER
        self._profile: Any = None

    def around(self, steps: Iterator[Step], state: State) -> Iterator[Step]:
        """The same steps; those in the window are recorded, from loading their data to what is saved after them."""
        while state.step < self.window.stop and not state.is_over():
            if state.step not in self.window:
                yield next(steps)
                continue
            if not self._profile:
                self._begin(state.step)
            with record_function(f"step {state.step + 1}"):
                yield next(steps)
        if self._profile:
            with activity.during(CHECKPOINT):
                self._end()
        yield from steps

    def _begin(self, step: int) -> None:
        hosts = self.world.all_gather(socket.gethostname())
        stamps = self.world.all_gather(_stamps(self.world))
        ahead = clocks_ahead(stamps, hosts)
        if self.memory:
            torch.cuda.memory._record_memory_history(max_entries=EVENTS)
        cuda = [ProfilerActivity.CUDA] * (self.world.device.type == "cuda")
        if not cuda:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would complain that there is no GPU
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])
        self._profile.start()
        facts = {
            "rank": self.world.rank,
            "world_size": self.world.world_size,
            "host": hosts[self.world.rank],
            "steps": f"{step}:{self.window.stop}",
            "clock_ahead_ns": ahead[self.world.rank],
            "session": stamps[0][-1],
        }
        self._profile.add_metadata_json(FACTS, json.dumps(facts))

    def _end(self) -> None:
        """Write what was recorded; a disk that is full costs the trace, not the training."""
        self._profile.stop()
        trace, snapshot = (self.folder / f"rank-{self.world.rank}.{kind}" for kind in ("json", "memory.pickle"))
        part = trace.with_name(f".{trace.name}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(part))
            _keep_older(trace)
            part.replace(trace)
            if self.memory:
                _keep_older(snapshot)
                torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
            if self.world.rank == 0:
                self._report(self._profile.key_averages())
        except (OSError, RuntimeError) as error:
            log.error("no trace in %s: %s", self.folder, error)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if self.memory:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None

    def _report(self, averages: Any) -> None:
        text = operators(averages, KEPT).encode()
        write_atomically(self.folder / "operators.txt", lambda file: file.write(text))
        with contextlib.suppress(OSError):  # a pipe that is gone
            say(f"{operators(averages, SHOWN)}evenkeel: traces are in {near(self.folder)}")


def _stamps(world: World) -> list[int]:
    """This rank's clock, in nanoseconds, each time that all ranks have met."""
    stamps = []
    for _ in range(ROUNDS):
        world.all_gather(None)  # a barrier
        stamps.append(time.time_ns())
    return stamps


def clocks_ahead(stamps: list[list[int]], hosts: list[str]) -> list[int]:
    """By how many nanoseconds each rank's clock is ahead of rank 0's. Ranks of one host share a clock.

    The remaining error is the latency of the barrier, usually less than a millisecond; NTP is about as accurate.

    Args:
        stamps: of each rank, in the same rounds.
        hosts: of each rank.

    >>> clocks_ahead([[0, 10, 20], [3, 12, 40], [1007, 1010, 1021]], ["a", "a", "b"])
    [0, 0, 1001]
    """
    first = {host: hosts.index(host) for host in hosts}
    return [
        round(statistics.median(b - a for a, b in zip(stamps[0], stamps[first[host]], strict=True))) for host in hosts
    ]


def _keep_older(path: Path) -> None:
    """Give a file of an earlier window another name: rank-0.json-2."""
    if path.exists():
        path.rename(unused(path))


def operators(averages: Any, most: int) -> str:
    """The operators that took the most time by themselves, as a table with a line for each.

    Args:
        averages: from `torch.profiler.profile.key_averages`; times in microseconds.
        most: lines.
    """
    device = "device" if any(it.self_device_time_total for it in averages) else "cpu"
    own = f"self_{device}_time_total"
    found = (it for it in averages if getattr(it, own) and not it.is_user_annotation)
    rows = sorted(found, key=lambda it: getattr(it, own), reverse=True)
    total = sum(getattr(it, own) for it in rows) or 1
    lines = [f"{'operator, rank 0':44} {'calls':>7} {f'self {device} ms':>14} {'share':>6} {'with calls ms':>14}"]
    for it in rows[:most]:
        mine, with_calls = getattr(it, own), getattr(it, f"{device}_time_total")
        lines.append(
            f"{it.key[:44]:44} {it.count:7} {mine / 1e3:14.2f} {100 * mine / total:5.1f}% {with_calls / 1e3:14.2f}"
        )
    return "\n".join(lines) + "\n"

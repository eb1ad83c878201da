"""What can be done to a job, and in which order: kinds of faults and the seeded schedule of them.

A schedule depends on the seed and nothing else, not even on what there is to hit: a fault carries numbers in
[0, 1), and only when its time has come do they choose among the ranks, agents or nodes that live then.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from . import tree
from .job import Job

T = TypeVar("T")

FILLED_SECONDS = 5.0
"""How long a disk stays full."""

DOWN_SECONDS = 20.0
"""The longest time that a node stays away. The others need about ten seconds to go on without it."""

SAFE = ("kill", "term", "stop", "truncate", "agent")
"""Faults that reach nothing but the job and its run directory."""


@dataclass(frozen=True)
class Fault:
    """One thing to do to the job."""

    kind: str
    after: float
    """Seconds since the fault before it."""
    victim: float
    """Which of those that live, in [0, 1)."""
    amount: float
    """How much of it, in [0, 1)."""

    @property
    def restarts(self) -> bool:
        """Whether the job has to start its ranks again."""
        return self.kind not in ("truncate", "fill")


@dataclass(frozen=True)
class Blow:
    """A fault whose victim is known."""

    whom: str
    strike: Callable[[], None]


class Missed(Exception):  # noqa: N818
    """There is nothing that the fault could hit; the message says what is missing."""


def schedule(kinds: Sequence[str], every: float, seed: int) -> Iterator[Fault]:
    """An endless list of faults, the same for the same arguments.

    Args:
        kinds: to choose from, each equally likely.
        every: mean seconds between two faults; they are between half and one and a half times that apart.
        seed: of the choices.
    """
    dice = random.Random(seed)
    while True:
        yield Fault(dice.choice(kinds), every * dice.uniform(0.5, 1.5), dice.random(), dice.random())


def aim(fault: Fault, job: Job, run_dir: Path) -> Blow:
    """Choose a fault's victim among what there is now.

    Raises:
        Missed: there is none.
    """
    return KINDS[fault.kind](fault, job, run_dir)


def _signal_rank(number: signal.Signals) -> Callable[[Fault, Job, Path], Blow]:
    def aim_at_rank(fault: Fault, job: Job, _run_dir: Path) -> Blow:
        victim = _choose(job.workers(), fault.victim, "no rank lives")
        return Blow(f"rank {victim.rank} (pid {victim.pid})", lambda: tree.send(victim.pid, number))

    return aim_at_rank


def _kill_agent(fault: Fault, job: Job, _run_dir: Path) -> Blow:
    agents = sorted({worker.agent for worker in job.workers()})
    agent = _choose(agents, fault.victim, "no agent has ranks")
    return Blow(f"torchrun (pid {agent})", lambda: tree.send(agent, signal.SIGKILL))


def _truncate(fault: Fault, _job: Job, run_dir: Path) -> Blow:
    """Cut off the end of the newest checkpoint, as a machine does that loses power before it has written all."""
    try:
        newest = max((run_dir / "checkpoints").glob("step-*/state.pt"), key=lambda path: path.parent.name)
        size = newest.stat().st_size
    except (ValueError, FileNotFoundError):
        raise Missed("there is no checkpoint yet") from None
    length = int(size * fault.amount)

    def cut() -> None:
        with contextlib.suppress(FileNotFoundError):  # the job has deleted it meanwhile
            os.truncate(newest, length)

    return Blow(f"{newest.parent.name}, {size} bytes to {length}", cut)


def _fill(_fault: Fault, _job: Job, run_dir: Path) -> Blow:
    def fill() -> None:
        # without a name: the kernel takes it back when this process ends, however it ends
        with tempfile.TemporaryFile(dir=run_dir) as file:
            fill_disk(file.fileno())
            time.sleep(FILLED_SECONDS)

    return Blow(f"the disk of {run_dir}, for {FILLED_SECONDS:g} s", fill)


def fill_disk(descriptor: int) -> None:
    """Let a file take all that its file system has left."""
    size, piece = 0, 1 << 30  # in pieces, between which Ctrl-C is heard
    while piece >= 1 << 12:
        try:
            os.posix_fallocate(descriptor, size, piece)
            size += piece
        except OSError:
            piece //= 2


def _lose_node(fault: Fault, job: Job, _run_dir: Path) -> Blow:
    """Any but node 0: that one hosts the rendezvous, and its loss is the loss of all agents, which `agent` covers."""
    node = _choose([node for node in job.running if node != 0], fault.victim, "no node but node 0 is up")
    seconds = DOWN_SECONDS * fault.amount

    def lose() -> None:
        assert job.lab
        job.kill_node(node)
        time.sleep(seconds)
        job.lab.start_node(node)
        job.start(node)

    return Blow(f"node {node}, back in {seconds:.0f} s", lose)


def _choose(among: Sequence[T], where: float, missing: str) -> T:
    if not among:
        raise Missed(missing)
    return among[int(where * len(among))]


KINDS: dict[str, Callable[[Fault, Job, Path], Blow]] = {
    "kill": _signal_rank(signal.SIGKILL),
    "term": _signal_rank(signal.SIGTERM),
    "stop": _signal_rank(signal.SIGSTOP),
    "truncate": _truncate,
    "fill": _fill,
    "agent": _kill_agent,
    "node": _lose_node,
}
"""How each kind of fault finds its victim, by name."""

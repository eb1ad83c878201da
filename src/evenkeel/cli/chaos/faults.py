"""The kinds of faults, and their schedule.

The schedule depends on the seed only, not even on the possible victims: a fault has numbers in [0, 1), which choose
among the ranks, agents or nodes that are alive at its time.
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

from ...common.files import write_json
from ...common.naming import BIT_FLIPS
from .job import Job
from .nodes import send

T = TypeVar("T")

SAFE = ("kill", "keeper", "term", "stop", "truncate", "agent")  # they affect nothing but the job and its run directory
KINDS = (*SAFE, "fill", "bitflip", "node")
SIGNALS = {"kill": signal.SIGKILL, "keeper": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}

FILLED_SECONDS = 5.0  # how long a disk stays full
DOWN_SECONDS = 20.0  # the longest time for which a node is gone; the others go on without it after about ten


@dataclass(frozen=True)
class Fault:
    """One thing to do to the job."""

    kind: str
    after: float = 0.0  # seconds since the fault before it
    victim: float = 0.0  # which of the possible victims, in [0, 1)
    amount: float = 0.0  # how much of it, in [0, 1)

    @property
    def restarts(self) -> bool:
        """Whether the job has to start its ranks again."""
        return self.kind not in ("truncate", "fill", "bitflip")


class Missed(Exception):  # noqa: N818
    """The fault has no victim; the message says what is missing."""


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


def strike(fault: Fault, job: Job, run_dir: Path, announce: Callable[[str], object]) -> None:
    """Choose the fault's victim among those alive now, announce it, and do the fault.

    Raises:
        Missed: there is no victim.
    """
    if fault.kind in SIGNALS:
        worker = _choose(job.workers(), fault, "no rank lives")
        pid = worker.started if fault.kind == "keeper" else worker.pid
        announce(f"rank {worker.rank} (pid {pid})")
        send(pid, SIGNALS[fault.kind])
    elif fault.kind == "bitflip":
        rank = _choose(job.workers(), fault, "no rank lives").rank
        where, sticky = ("gradient", "weight")[int(2 * fault.amount)], int(4 * fault.amount) % 2 == 1
        announce(f"rank {rank}, a bit of a {where}, {'on every use' if sticky else 'once'}")
        planted = {"rank": rank, "where": where, "sticky": sticky, "seed": int(fault.amount * 2**32)}
        write_json(Path(os.environ[BIT_FLIPS]), planted)
    elif fault.kind == "agent":
        agent = _choose(sorted({worker.agent for worker in job.workers()}), fault, "no agent has ranks")
        announce(f"torchrun (pid {agent})")
        send(agent, signal.SIGKILL)
    elif fault.kind == "truncate":  # as on a machine that loses power before it has written everything
        try:
            _, newest = sorted((run_dir / "checkpoints").glob("step-*/state.pt"))[-2:]
            size = newest.stat().st_size
        except (ValueError, FileNotFoundError):  # without another one the run could not go on
            raise Missed("there are no two checkpoints yet") from None
        length = int(size * fault.amount)
        announce(f"{newest.parent.name}, {size} bytes to {length}")
        with contextlib.suppress(FileNotFoundError):  # the job has deleted it meanwhile
            os.truncate(newest, length)
    elif fault.kind == "fill":
        announce(f"the disk of {run_dir}, for {FILLED_SECONDS:g} s")
        # a file without a name: the kernel frees it when this process ends, however it ends
        with tempfile.TemporaryFile(dir=run_dir) as file:
            fill_disk(file.fileno())
            time.sleep(FILLED_SECONDS)
    else:  # node 0 hosts the rendezvous: to lose it is to lose all agents, which `agent` covers
        node = _choose([node for node in job.running if node != 0], fault, "no node but node 0 is up")
        assert job.lab
        announce(f"node {node}, back in {DOWN_SECONDS * fault.amount:.0f} s")
        job.lab.kill_node(node)
        job.stop(node)
        time.sleep(DOWN_SECONDS * fault.amount)
        job.lab.start_node(node)
        job.start(node)


def fill_disk(descriptor: int) -> None:
    """Fill the rest of the file system with a file."""
    size, piece = 0, 1 << 30  # in pieces, between which Ctrl-C works
    while piece >= 1 << 12:
        try:
            os.posix_fallocate(descriptor, size, piece)
            size += piece
        except OSError:
            piece //= 2


def _choose(among: Sequence[T], fault: Fault, missing: str) -> T:
    if not among:
        raise Missed(missing)
    return among[int(fault.victim * len(among))]

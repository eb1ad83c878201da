"""What ranks last reported about themselves, and what that says of a hang: which rank is where, who may be to blame."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..common.naming import name_ranks, owner
from ..common.phases import REDUCTION, activity
from ..distributed.devices import device_name, node_name
from ..distributed.world import World


@dataclass(frozen=True)
class Beat:
    """What a rank last reported about itself."""

    count: int
    """Beats so far. If this does not change, the rank is frozen."""
    step: int
    phase: str
    host: str
    pid: int
    node: str = ""
    """The name by which Slurm knows its node; outside Slurm the host's."""
    device: str = ""
    """Both names of its GPU; "" for a CPU."""
    place: str = ""
    """Where its main thread is in the user's code, as " at FILE:LINE"; "": in none, or in the main program."""


def beat_now(world: World, count: int = 0) -> Beat:
    """What this rank reports at this moment."""
    device = device_name(world.device) if world.device.type == "cuda" else ""
    host, place = socket.gethostname(), _place()
    return Beat(count, activity.step, activity.phase, host, os.getpid(), node_name(), device, place)


def _place() -> str:
    # by hand: `traceback` asks for the files' times, and this thread must go on beating if a file system hangs
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and owner(frame.f_code.co_filename) != "user":
        frame = frame.f_back
    if not frame or frame.f_code.co_filename == getattr(sys.modules["__main__"], "__file__", ""):
        return ""
    return f" at {frame.f_code.co_filename}:{frame.f_lineno}"


class Findings(NamedTuple):
    """What a rank finds out about all ranks after a hang."""

    where: str  # which rank is where, in a line
    lowest: int  # the lowest live rank, which speaks for all
    frozen: list[Beat]  # of ranks whose heartbeat has stopped
    blamed: list[str]  # nodes that may be the cause
    hung: str = ""  # which ranks hung, in short, for the next attempt


def _groups(beats: dict[int, Beat], frozen: list[int]) -> list[tuple[tuple[bool, str, int], list[int]]]:
    """(frozen or not, phase, step) -> the ranks there, the likely culprits first."""
    groups: dict[tuple[bool, str, int], list[int]] = {}
    for rank, beat in beats.items():
        groups.setdefault((rank in frozen, beat.phase, beat.step), []).append(rank)

    def innocence(group: tuple[bool, str, int]) -> tuple[bool, bool, int]:
        silent, phase, _ = group
        return not silent, phase == REDUCTION, len(groups[group])

    return [(group, groups[group]) for group in sorted(groups, key=innocence)]


def describe(beats: dict[int, Beat], frozen: list[int]) -> str:
    """Which rank is where, the likely culprits first: "rank 3 in data loading of step 812; ranks 0-2 wait in ..."."""
    parts = []
    for (silent, phase, step), ranks in _groups(beats, frozen):
        does = "does not answer any more, last seen" if silent else "waits" if phase == REDUCTION else "is"
        if len(ranks) > 1:
            does = {"is": "are", "waits": "wait"}.get(does, does.replace("does", "do"))
        which = name_ranks(ranks)
        if silent and (devices := [f"{beats[r].device} of {beats[r].host}" for r in ranks if beats[r].device]):
            which += f" ({', '.join(devices)})"  # the GPU may be the cause
        parts.append(f"{which} {does} in {phase} of step {step + 1}{_place_of(beats[ranks[0]])}")
    return "; ".join(parts)


def hung(beats: dict[int, Beat], frozen: list[int]) -> str:
    """Which ranks hung, in short: "rank 3 hung in data loading of step 812"; frozen ones are killed for that."""
    if frozen:
        return f"{name_ranks(frozen)} hung and {'were' if len(frozen) > 1 else 'was'} killed"
    groups = _groups(beats, frozen)
    suspects = [group for group in groups if group[0][1] != REDUCTION] or groups
    return ", ".join(
        f"{name_ranks(ranks)} hung in {phase} of step {step + 1}{_place_of(beats[ranks[0]])}"
        for (_, phase, step), ranks in suspects
    )


def _place_of(beat: Beat) -> str:
    return "" if beat.phase == REDUCTION else beat.place


def blamed(beats: Mapping[int, Beat], frozen: Collection[int]) -> list[str]:
    """The nodes of the ranks that all others wait for: frozen ones; if there are none, those not in the reduction.

    Empty if that would be more than half of the nodes: the network, the file system or the code is likelier then.
    """
    waiting = [rank for rank, beat in beats.items() if beat.phase == REDUCTION]
    suspects = frozen or (beats.keys() - waiting if waiting else ())
    behind = min((beats[rank].step for rank in suspects), default=0)  # another may wait for it outside the reduction
    nodes = {beats[rank].node for rank in suspects if beats[rank].step == behind}
    return sorted(nodes) if 2 * len(nodes) <= len({beat.node for beat in beats.values()}) else []

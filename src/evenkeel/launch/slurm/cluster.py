"""The partitions of a cluster, to refuse an impossible job before it is submitted."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...common.errors import Refusal
from ..limits import minutes_of, show_time
from .jobs import slurm, without


@dataclass(frozen=True)
class Partition:
    """A partition, over all its nodes."""

    name: str
    default: bool
    nodes: int
    gpus: int  # of its best node
    minutes: int | None  # longest time of a job; None: no limit


def choose(
    partitions: list[Partition], name: str | None, nodes: int, gpus: int | None, minutes: int | None
) -> Partition:
    """The partition of this name, or the default one; refused if it lacks what is asked for (None: not typed).

    Slurm lets a job that asks for more nodes or time than its partition has wait for ever.
    """
    chosen = next((it for it in partitions if (it.default if name is None else it.name == name)), None)
    if not chosen:
        why = "is missing: the cluster has no default one" if name is None else f"{name}: does not exist"
        raise Refusal(f"--partition {why}; the cluster has {', '.join(partition.name for partition in partitions)}")
    if nodes > chosen.nodes:
        raise Refusal(f"-n {nodes}: partition {chosen.name} has {chosen.nodes} nodes; ask for fewer")
    if gpus is not None and 0 < chosen.gpus < gpus:
        raise Refusal(f"-g {gpus}: a node of partition {chosen.name} has {chosen.gpus} GPUs; ask for fewer")
    if minutes and chosen.minutes and minutes > chosen.minutes:
        raise Refusal(
            f"--time {show_time(minutes)}: partition {chosen.name} allows {show_time(chosen.minutes)}; ask for less: a "
            "job that reaches its limit is requeued and continues"
        )
    return chosen


def partitions() -> list[Partition]:
    """All partitions that this user can see; a SlurmError if there is no Slurm here."""
    command = ["sinfo", "--all", "--noheader", "--format=%P|%l|%D|%G"]
    lines = slurm(*command, env=without("SINFO_")).splitlines()
    found: dict[str, Partition] = {}
    for line in (line for line in lines if "|" in line):  # one for each kind of node; not "CLUSTER: name"
        name, limit, nodes, gres = line.split("|")
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres))
        it = Partition(name.rstrip("*"), name.endswith("*"), int(nodes), gpus, minutes_of(limit))
        if known := found.get(it.name):
            it = replace(known, nodes=known.nodes + it.nodes, gpus=max(known.gpus, gpus))
        found[it.name] = it
    return list(found.values())

"""What a cluster has, as far as a job can be refused for it before it is submitted."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from ..errors import Refusal
from ..launch import check_size
from .commands import SlurmError, slurm

LONGEST_TIME = 366 * 24 * 60
"""Minutes of a --time that can be meant."""


@dataclass(frozen=True)
class Partition:
    """As `sinfo` has it, over all its nodes."""

    name: str
    default: bool
    up: bool
    nodes: int
    gpus: int
    """The most that one of its nodes has."""
    minutes: int | None
    """The longest that a job may run; None: no limit."""


@dataclass(frozen=True)
class Request:
    """What a job asks for. Made by :meth:`against`, it is filled in and can be had."""

    min_nodes: int
    max_nodes: int
    gpus: int | None
    partition: str | None
    minutes: int | None

    def against(self, partitions: list[Partition]) -> Request:
        """The same with the cluster's defaults filled in.

        Raises:
            Refusal: it asks for what does not exist.
        """
        chosen = self._choose(partitions)
        if self.max_nodes > chosen.nodes:
            raise Refusal(f"-n {self.max_nodes}: partition {chosen.name} has {chosen.nodes} nodes; ask for fewer")
        if self.gpus is not None and 0 < chosen.gpus < self.gpus:
            raise Refusal(f"-g {self.gpus}: a node of partition {chosen.name} has {chosen.gpus} GPUs; ask for fewer")
        if self.minutes and chosen.minutes and self.minutes > chosen.minutes:
            raise Refusal(
                f"--time {show_time(self.minutes)}: partition {chosen.name} allows {show_time(chosen.minutes)}; ask "
                "for less: a job that meets its limit is requeued and goes on"
            )
        gpus = self.gpus if self.gpus is not None else chosen.gpus or None
        check_size(1 if gpus is None else gpus, self.min_nodes, self.max_nodes)
        minutes = self.minutes or chosen.minutes or 24 * 60
        return replace(self, gpus=gpus, partition=chosen.name, minutes=minutes)

    def _choose(self, partitions: list[Partition]) -> Partition:
        names = ", ".join(partition.name for partition in partitions)
        if self.partition is None:
            found = [partition for partition in partitions if partition.default]
            if not found:
                raise Refusal(f"--partition is missing: the cluster has no default one; it has {names}")
        else:
            found = [partition for partition in partitions if partition.name == self.partition]
            if not found:
                raise Refusal(f"--partition {self.partition}: does not exist; the cluster has {names}")
        if not found[0].up:
            raise Refusal(f"--partition {found[0].name}: is not up; the cluster has {names}")
        return found[0]


def partitions() -> list[Partition]:
    """All that this user can see.

    Raises:
        Refusal: there is no Slurm here.
    """
    try:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SINFO_")}
        lines = slurm("sinfo", "--all", "--noheader", "--format=%P|%a|%l|%D|%G", env=plain).splitlines()
    except SlurmError as error:
        raise Refusal(f"no Slurm on this machine: {error}; launch/ starts a job on machines without it") from None
    found: dict[str, Partition] = {}
    for line in (line for line in lines if "|" in line):  # one for each kind of node; not "CLUSTER: name"
        name, avail, limit, nodes, gres = line.split("|")
        gpus = [int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres)]
        other = Partition(
            name.rstrip("*"), name.endswith("*"), avail == "up", int(nodes), sum(gpus), parse_limit(limit)
        )
        known = found.get(other.name)
        found[other.name] = (
            replace(known, nodes=known.nodes + other.nodes, gpus=max(known.gpus, other.gpus)) if known else other
        )
    return list(found.values())


def parse_limit(text: str) -> int | None:
    """Minutes of a limit as sinfo writes it: [days-]hours:minutes:seconds, minutes:seconds, or "infinite"."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not found:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes


def parse_time(text: str) -> int:
    """Minutes of --time as people write it for sbatch: MINUTES, H:MM:SS, D-H, D-H:MM, D-H:MM:SS; or 90m, 12h, 2d.

    Raises:
        Refusal: it is none of these.
    """
    unit = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    if unit:
        minutes = int(unit[1]) * {"m": 1, "h": 60, "d": 24 * 60}[unit[2]]
    elif re.fullmatch(r"[0-9]{1,6}", text):
        minutes = int(text)
    elif found := re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})(?::([0-9]{1,6}))?(?::([0-9]{1,6}))?", text):
        days, hours, rest, seconds = (int(part or 0) for part in found.groups())
        minutes = (days * 24 + hours) * 60 + rest + (seconds + 59) // 60
    elif found := re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})(?::([0-9]{1,6}))?", text):
        first, second, third = (int(part or 0) for part in found.groups())
        # as for sbatch, M:SS has two numbers and H:MM:SS three
        minutes = first * 60 + second + (third + 59) // 60 if found[3] else first + (second + 59) // 60
    else:
        minutes = 0
    if not 1 <= minutes <= LONGEST_TIME:
        raise Refusal(f"--time {text}: give minutes, H:MM:SS or D-HH:MM:SS, or 90m, 12h, 2d, a year at most")
    return minutes


def show_time(minutes: int) -> str:
    """Minutes as Slurm writes them."""
    days, rest = divmod(minutes, 24 * 60)
    return (f"{days}-" if days else "") + f"{rest // 60:02d}:{rest % 60:02d}:00"

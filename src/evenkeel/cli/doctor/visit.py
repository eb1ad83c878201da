"""One visit: which checks in which order, alone or on all ranks of torchrun, and the exit code."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from ...common.display import say
from ...common.errors import Refusal
from ...common.processes import await_parents_death, end_agent, torchrun_agent
from ...config import Config, devices_per_rank
from ...distributed.exits import SPEAKER_TIMEOUT, leave
from ...distributed.world import World
from ...launch.topology import parse_master
from ...tasks.command_line import parse
from . import collectives, devices, host, network, software, storage
from .findings import Finding, Report, as_json, examine, merge, show, worst

Checks = Iterator[tuple[str, Callable[[], Iterable[Finding]]]]
"""Names and functions."""


class Visit:
    """The findings of this process, and the meeting with the other ranks. For the arguments see `command.py`."""

    def __init__(self, job: list[str], run_dir: Path | None, master: str, timeout: float, json: bool) -> None:
        self.start, self.master, self.timeout, self.json = time.monotonic(), master, timeout, json
        self.config, _ = parse(job)
        assert self.config.run_dir is not None  # resolved
        self.folder = run_dir or self.config.run_dir
        self.nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self.limit = timeout + 2
        """Seconds for a check: more than a collective's time-out, so that the collective's own error is shown."""
        self.world, found = find_world(self.config)
        self.own = Report(self.world.rank, socket.gethostname(), found)

    def run(self) -> int:
        """Do all checks and print the findings once; returns the exit code, or ends a rank of torchrun with it."""
        for name, check in self.local_checks():
            self.own.findings += examine(name, check, self.limit)
        if self.world.launched:
            leave(self.together())
        self.tell([self.own], "1 process")
        return int(worst(self.own.findings) == "FAIL")

    def together(self) -> int:
        """Meet the other ranks, check what they do together, and agree on the exit code."""
        world, seconds = self.world, self.timeout
        title = f"{world.world_size} ranks on {self.nodes} node{'s' * (self.nodes > 1)}"
        if store := self.meet():
            reports = network.collect(store, world, self.own, 2 * seconds)
            if world.rank == 0:
                self.tell(reports, title)
            level = worst(finding for report in reports for finding in report.findings)
            level = network.verdict(store, world, level, 3 * seconds)
        else:
            level = "FAIL"
            if world.local_rank == 0:
                self.tell([self.own], f"rank {world.rank} of {title}, alone")
        if level != "FAIL":
            return 0
        agent = torchrun_agent()  # it would restart the ranks
        if agent and (world.local_rank == 0 or not await_parents_death(SPEAKER_TIMEOUT, agent)):
            end_agent(agent, failed=True)
        return 1

    def meet(self) -> Store | None:
        """The store of this job, after the joint checks; None if the ranks have not met."""
        seconds, findings = self.timeout, self.own.findings
        try:
            store = network.join(self.world, seconds)
        except Exception as error:
            text = " ".join(str(error).split())[:500]
            again = f"torchrun ... -m evenkeel doctor --timeout {6 * seconds:g}    # if they are only slow to start"
            findings.append(Finding("FAIL", "ranks meet", text, f"all ranks within {seconds:g} s", again))
            return None
        for name, check in self.joint_checks(store):
            found = examine(name, check, self.limit, crash="FAIL")
            findings += found
            if any(it.name == name and it.level == "FAIL" for it in found):
                break  # it crashed or hung here, and the others may still be in it
        return store

    def local_checks(self) -> Checks:
        """Of this process; most of them once a node."""
        world, config = self.world, self.config
        yield "versions", partial(software.versions, config.shard != "off")
        yield "device", partial(devices.own_device, world)
        yield "limits", host.limits
        if world.local_rank:
            return
        yield "GPUs", devices.gpus
        yield "cores", partial(host.cores, world.local_world_size, config.num_workers)
        shared_memory = config.num_workers > 0 or (world.device.type == "cuda" and world.local_world_size > 1)
        yield "shared memory", partial(host.shared_memory, shared_memory)
        yield "variables", partial(host.variables, each=devices_per_rank(config))
        yield "Weights & Biases", partial(host.weights_and_biases, config.wandb)
        yield "host name", partial(network.host_name, self.nodes)
        if world.launched:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            yield "address of node 0", partial(network.master, *address, self.nodes)
        else:
            address = parse_master(self.master or "127.0.0.1")
            if self.master:
                yield "address of node 0", partial(network.master, *address, 2)
            yield "port", partial(network.free_port, *address, bool(self.master))
            yield "speeds", partial(collectives.speeds, world)
        yield "run directory", partial(storage.run_directory, self.folder)

    def joint_checks(self, store: Store) -> Checks:
        """Checks of all ranks together, in the same order."""
        world = self.world
        yield "round trip", partial(network.round_trip, store, world.rank)
        yield "process group", partial(collectives.connect, world, store, self.timeout)
        yield "comparing devices", partial(collectives.claims, world)
        yield "comparing clocks", partial(collectives.clocks, world)
        yield "comparing folders", partial(storage.shared, world, self.folder, self.config.shard != "off")
        yield "collectives", partial(collectives.collectives, world)
        yield "comparing speeds", partial(collectives.speeds, world)

    def tell(self, reports: list[Report], title: str) -> None:
        """Print the findings of all ranks."""
        merged, seconds = merge(reports), time.monotonic() - self.start
        if self.json:
            say(as_json(merged, title, seconds))
        else:
            show(merged, title, seconds)


def find_world(config: Config) -> tuple[World, list[Finding]]:
    """This process's place in the job. A refusal of training is a finding; the checks then go on without GPUs."""
    try:
        return World.from_environment(devices_per_rank(config), config.strategy, config.share_gpu), []
    except Refusal as refusal:
        text, _, remedy = str(refusal).partition(";")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()]
    whole = len(values) == len(names) and "MASTER_ADDR" in os.environ and os.environ.get("MASTER_PORT", "").isdigit()
    rank, local_rank, size, local_size = values if whole else (0, 0, 1, 1)
    world = World(rank, local_rank, size, local_size, torch.device("cpu"), whole)
    return world, [Finding("FAIL", "ranks and devices", text, "what train.py accepts", remedy.strip())]

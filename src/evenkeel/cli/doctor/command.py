"""`python -m evenkeel doctor`: the checks, alone or on all ranks of torchrun, and the exit code."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ...config import Flag, MaybePath

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from ...config import Config
    from ...distributed.world import World
    from .findings import Finding, Report

Check = Callable[[], "Iterable[Finding]"]


@dataclass(frozen=True)
class DoctorCommand:
    """Check the machines before a job: versions, GPUs, memory, network, clocks, run directory, collectives.

      python -m evenkeel doctor                                             this machine
      torchrun --standalone --nproc_per_node=2 -m evenkeel doctor           all ranks of a job

    What follows after `--` are the options of train.py that the job will have. Each finding is OK, WARN or FAIL; the
    last two say what was expected and which line to type. Exit code: 1 if there is a FAIL.
    """

    run_dir: MaybePath = None
    """Folder to test; nothing stays in it. Default: the run directory of the job's options."""
    master: Annotated[str, tyro.conf.arg(metavar="HOST[:PORT]")] = ""
    """Without torchrun: the address of node 0 that several nodes will use. Default: only the port, 29500, is tested."""
    timeout: float = 10.0
    """Seconds that the ranks wait for each other, and that a check may take."""
    json: Flag = False
    """For programs: print a JSON object."""

    def __call__(self, train_options: list[str]) -> int:
        """Check, print the findings once, and return 1 if there is a FAIL."""
        from ...distributed.exits import leave
        from ...tasks.command_line import parse
        from .findings import Report, worst

        start = time.monotonic()
        config, _ = parse(train_options)
        world, refused = find_world()
        own = Report(world.rank, socket.gethostname(), refused)
        for name, check in self.local_checks(world, config):
            own.findings += self.examine(name, check)
        if world.launched:
            leave(self.together(world, own, config, start))
        self.tell([own], "1 process", start)
        return int(worst(own.findings) == "FAIL")

    def together(self, world: World, own: Report, config: Config, start: float) -> int:
        """Meet the other ranks, check what they do together, and agree on the exit code."""
        from .findings import merge, worst
        from .network import collect, verdict

        store = self.meet(world, own, config)
        title = f"{world.world_size} ranks on {os.environ.get('GROUP_WORLD_SIZE', '1')} nodes"
        if store is None:
            if world.local_rank == 0:
                self.tell([own], f"rank {world.rank} of {title}, alone", start)
            level = worst(own.findings)
        else:
            reports = collect(store, world, own, 2 * self.timeout)
            if world.rank == 0:
                self.tell(reports, title, start)
            found = worst(it.finding for it in merge(reports))
            level = verdict(store, world, found, 3 * self.timeout)
        if level == "FAIL":
            end_without_restart(world)
        return int(level == "FAIL")

    def meet(self, world: World, own: Report, config: Config) -> Store | None:
        """The store of this job, after the joint checks; None if the ranks have not met."""
        from .findings import Finding
        from .network import join, round_trip

        try:
            store = join(world, self.timeout)
        except Exception as error:
            text = " ".join(str(error).split())[:500]
            again = (
                f"torchrun ... -m evenkeel doctor --timeout {6 * self.timeout:g}    # if they are only slow to start"
            )
            own.findings.append(Finding("FAIL", "ranks meet", text, f"all ranks within {self.timeout:g} s", again))
            return None
        own.findings += self.examine("store", partial(round_trip, store, world.rank))
        for name, check in self.joint_checks(world, config, store):
            found = self.examine(name, check, crash="FAIL")
            own.findings += found
            if any(it.name == name and it.level == "FAIL" for it in found):
                break  # it crashed or hung here, and the others may still be in it
        return store

    def local_checks(self, world: World, config: Config) -> Iterator[tuple[str, Check]]:
        """Of this process; most of them once a node."""
        from . import collectives, devices, host, network, software, storage

        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        cuda = world.device.type == "cuda"
        yield "versions", software.versions
        yield "device", partial(devices.own_device, world)
        yield "limits", host.limits
        if world.local_rank:
            return
        yield "GPUs", devices.gpus
        yield "cores", partial(host.cores, world.local_world_size, config.num_workers)
        needed = config.num_workers > 0 or (cuda and world.local_world_size > 1)
        yield "/dev/shm", partial(host.shared_memory, needed)  # noqa: S108
        yield "variables", host.variables
        yield "Weights & Biases", partial(host.weights_and_biases, config.wandb)
        if world.launched:
            yield "host name", partial(network.host_name, nodes)
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            yield "address of node 0", partial(network.master, *address, nodes)
        else:
            yield from self.network_checks()
            yield "speed", partial(collectives.speeds, world)
        yield "run directory", partial(storage.run_directory, self.folder(config))

    def network_checks(self) -> Iterator[tuple[str, Check]]:
        """Of a single process, before a job."""
        from ...launch.topology import parse_master
        from . import network

        several = 2 if self.master else 1
        address = parse_master(self.master or "127.0.0.1")
        yield "host name", partial(network.host_name, several)
        if self.master:
            yield "address of node 0", partial(network.master, *address, several)
        yield "port", partial(network.free_port, *address)

    def joint_checks(self, world: World, config: Config, store: Store) -> Iterator[tuple[str, Check]]:
        """In which all ranks take part, in the same order."""
        from . import collectives, storage

        yield "process group", partial(collectives.connect, world, store, self.timeout)
        yield "comparing devices", partial(collectives.claims, world)
        yield "comparing clocks", partial(collectives.clocks, world)
        yield "comparing folders", partial(storage.shared, world, self.folder(config))
        yield "collectives", partial(collectives.collectives, world)
        yield "comparing speeds", partial(collectives.speeds, world)

    def folder(self, config: Config) -> Path:
        """The folder to test."""
        assert config.run_dir is not None  # resolved
        return self.run_dir or config.run_dir

    def examine(self, name: str, check: Check, crash: Literal["WARN", "FAIL"] = "WARN") -> list[Finding]:
        """Run a check, for longer than a collective may wait, so that its own error says what it waited for."""
        from .findings import examine

        return examine(name, check, self.timeout + 2, crash)

    def tell(self, reports: list[Report], title: str, start: float) -> None:
        """Print the findings of all ranks."""
        from .findings import as_json, merge, show

        seconds = time.monotonic() - start
        if self.json:
            print(as_json(merge(reports), title, seconds), flush=True)
        else:
            show(merge(reports), title, seconds)


def find_world() -> tuple[World, list[Finding]]:
    """Who this process is. What training would refuse here is a finding, and the checks go on without GPUs."""
    import torch

    from ...common.errors import Refusal
    from ...distributed.world import World
    from .findings import Finding

    try:
        return World.from_environment(), []
    except Refusal as refusal:
        text, _, remedy = str(refusal).partition(";")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()]
    whole = len(values) == len(names) and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    rank, local_rank, size, local_size = values if whole else (0, 0, 1, 1)
    world = World(rank, local_rank, size, local_size, torch.device("cpu"), whole)
    return world, [Finding("FAIL", "ranks and devices", text, "what train.py accepts", remedy.strip())]


def end_without_restart(world: World) -> None:
    """End torchrun as a refusal does: it would restart the ranks, or report a traceback of each."""
    from ...common.processes import end_agent, orphaned_within, torchrun_agent
    from ...distributed.exits import OTHERS_SPEAK

    agent = torchrun_agent()
    if agent and (world.local_rank == 0 or not orphaned_within(OTHERS_SPEAK, agent)):
        end_agent(agent)

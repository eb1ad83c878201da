"""The command lines of ``launch/single_node.py`` and ``launch/multi_node.py``: check all, become torchrun."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro

from . import run_directory
from .config import COMMAND_BOUNDS, check_numbers
from .errors import REFUSED, Refusal, one_line_errors, refuse_empty
from .launch import (
    DEFAULT_PORT,
    JOIN_SECONDS,
    Command,
    Topology,
    count_processes,
    parse_master,
    parse_nodes,
    torchrun,
)
from .network import Link, find_link, meet
from .processes import count_cores

if TYPE_CHECKING:
    from .config import Config

T = TypeVar("T")


@dataclass(frozen=True)
class SingleNode:
    """Start a training job on this machine. What comes after -- goes to train.py as it is.

      launch/single_node.py -- --epochs 5             one process for each GPU
      launch/single_node.py -g 4 -- --epochs 5        four processes
      launch/single_node.py -g 4 --dry-run            only print the command and its environment

    The launcher becomes torchrun, so signals are torchrun's. Exit code: 0 finished, 75 stopped and can be continued,
    2 refused, 137 killed, anything else is a bug.
    """

    gpus: Annotated[int | None, tyro.conf.arg(aliases=["-g"], metavar="N", help_behavior_hint="")] = None
    """GPUs of this node to use, one for each process or as --place says; without any, processes. Default: all, 2."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """How often this node may start its processes again after one of them, or another node, has died."""
    script: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """Run this instead of train.py."""
    dry_run: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Print the exact command and its environment, and start nothing."""

    def topology(self, gpus: int) -> Topology:
        """Return the topology that was typed."""
        return Topology(gpus, max_restarts=self.max_restarts)


@dataclass(frozen=True)
class MultiNode(SingleNode):
    """Start one node's share of a training job: run this on every node, each with its own -nr.

      launch/multi_node.py -n 2 -g 4 -nr 0 --master node0 -- --epochs 5     on the first node
      launch/multi_node.py -n 2 -g 4 -nr 1 --master node0 -- --epochs 5     on the second
      launch/multi_node.py -n 2:4 -nr 3 --master 10.0.0.1:29501 -- ...      elastic: runs on 2, 3 or 4

    The nodes may start in any order. Nodes other than node 0 may leave an elastic job and come back.
    """

    nodes: Annotated[str, tyro.conf.arg(aliases=["-n"], metavar="N|MIN:MAX")] = "1"
    """How many nodes; MIN:MAX for a job that may lose and gain nodes while it runs."""
    node_rank: Annotated[int | None, tyro.conf.arg(aliases=["-nr"], metavar="N", help_behavior_hint="")] = None
    """The number of this node, from 0."""
    master: Annotated[str | None, tyro.conf.arg(metavar="HOST[:PORT]", help_behavior_hint="")] = None
    """The address by which the other nodes reach node 0; the same on every node. Default port: 29500."""
    run_id: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """A name for the rendezvous; the same on every node. Default: evenkeel-PORT."""

    def topology(self, gpus: int) -> Topology:
        """Return the topology that was typed."""
        min_nodes, max_nodes = parse_nodes(self.nodes)
        host, port = parse_master(self.master) if self.master is not None else ("", DEFAULT_PORT)
        topology = Topology(
            gpus=gpus,
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            node_rank=self.node_rank or 0,
            master_host=host,
            master_port=port,
            run_id=self.run_id,
            max_restarts=self.max_restarts,
        )
        if topology.max_nodes > 1 and self.node_rank is None:
            raise Refusal(f"-nr is missing: with -n {self.nodes} give each node its own, from 0")
        return topology


def parse_arguments(options: type[T], argv: Sequence[str]) -> tuple[T, list[str]]:
    """Split at the first ``--`` into the launcher's options and train.py's; refuse in one line."""
    cut = argv.index("--") if "--" in argv else len(argv)
    refuse_empty(argv[:cut], options)
    text = inspect.getdoc(options)  # given by hand, or tyro joins the lines of the examples
    parsed = one_line_errors(
        lambda: tyro.cli(options, args=argv[:cut], description=text, config=(tyro.conf.FlagCreatePairsOff,)),
        hint="see --help; options for train.py come after --",
    )
    check_numbers(parsed, COMMAND_BOUNDS)
    return parsed, list(argv[cut + 1 :])


def check_train_options(train_args: Sequence[str]) -> Config:
    """Refuse bad options of train.py here, once, and not in every process of every node."""
    from .cli import parse  # brings torch: not before the cheap refusals

    config, _ = parse(train_args)
    return config


def check_job(train_args: Sequence[str]) -> Config:
    """As above, and that the run directory may hold this run; returns the options."""
    from .cli import parse
    from .config import saved_options

    config, task = parse(train_args)
    assert config.run_dir is not None  # resolved
    run_directory.check(
        config.run_dir, saved_options(config, task.options()), config.fresh, task.harmless, earlier=task.earlier
    )
    return config


def link_of(topology: Topology) -> Link:
    """How the other nodes reach this one."""
    host, port = topology.master_host, topology.master_port
    return find_link(host, port, is_master=topology.node_rank == 0) if host else Link("127.0.0.1")


def command_for(
    topology: Topology,
    script: Path,
    train_args: Sequence[str],
    *,
    cores: int = 0,
    link: Link | None = None,
    log_dir: Path | None = None,
) -> Command:
    """The command that starts the share of the node that this is.

    Args:
        topology: with the master's address, if there are several nodes.
        script: what the ranks run.
        train_args: its options.
        cores: of this node, for this job; 0: those that this process may use.
        link: how the others reach this node; None: found out here.
        log_dir: see :func:`~evenkeel.launch.torchrun`.
    """
    return torchrun(
        topology,
        link or link_of(topology),
        script,
        train_args,
        cores=cores or count_cores(),
        environ=os.environ,
        log_dir=log_dir,
    )


def wait_for_master(topology: Topology) -> None:
    """Return when node 0 can be met, if there are several nodes."""
    if topology.master_host:
        meet(topology.master_host, topology.master_port, is_master=topology.node_rank == 0, patience=JOIN_SECONDS)


@dataclass(frozen=True)
class Start:
    """This node's share of a job, checked and ready to be started."""

    typed: SingleNode
    topology: Topology
    command: Command
    config: Config | None
    """train.py's options; None for a script of the user's own."""


def prepare(options: type[SingleNode], argv: Sequence[str], train: Path) -> Start:
    """From a command line to what it starts, or a :class:`Refusal`.

    Args:
        options: of the launcher.
        argv: its command line.
        train: the script of a job that names no other.
    """
    typed, train_args = parse_arguments(options, argv)
    topology = typed.topology(1 if typed.gpus is None else typed.gpus)
    script = typed.script or train
    if not script.is_file():
        raise Refusal(f"--script {script}: no such file")
    config = check_train_options(train_args) if typed.script is None else None
    if config:
        check_company(config, topology.gpus * topology.max_nodes)
    topology = replace(topology, gpus=processes_of_node(config, typed.gpus) if config else count_processes(typed.gpus))
    try:
        link = link_of(topology)
    except Refusal as refusal:
        if not typed.dry_run:
            raise
        print(f"evenkeel: {refusal}; printed without what only its address tells", file=sys.stderr)
        link = Link("")
    return Start(typed, topology, command_for(topology, script, train_args, link=link), config)


def check_company(config: Config, processes: int) -> None:
    """Refuse more processes than the strategy of the job bears."""
    if config.strategy == "dp":
        import torch

        from .devices import refuse_company

        refuse_company(processes, torch.cuda.device_count())


def processes_of_node(config: Config, asked: int | None, given: int | None = None) -> int:
    """How many processes of a job to start here.

    Args:
        config: its options; with --strategy dp it is one process, unless more are asked for, which will be refused.
        asked: -g.
        given: GPUs that a cluster has given to the job. None: all that are here.
    """
    from .config import devices_per_rank

    if asked is None:
        asked = 1 if config.strategy == "dp" else given
    return count_processes(asked, devices_per_rank(config))


def topology_in(arguments: Sequence[str]) -> list[str]:
    """The launcher's command line in one of train.py; empty if it says nothing of nodes and processes.

    Jobs by ``torch.multiprocessing.spawn`` were started as ``python train.py -n 2 -g 4 -nr 0``, and people still do.
    Their node 0 was in MASTER_ADDR and MASTER_PORT, which count here where there is no --master.

    Raises:
        Refusal: torchrun has started this process, and so the others.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in (("-n", "--nodes"), ("-g", "--gpus"), ("-nr", "--node-rank"), ("--master",)):
        parser.add_argument(*names)
    try:
        typed, job = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise Refusal(str(error)) from None
    words = [f"--{name.replace('_', '-')}={value}" for name, value in vars(typed).items() if value is not None]
    if words and "RANK" in os.environ:
        raise Refusal(f"{words[0]}: torchrun has started the ranks; leave it out, or type python instead of torchrun")
    if words and typed.master is None and (host := os.environ.get("MASTER_ADDR")) and typed.nodes not in (None, "1"):
        words.append(f"--master={host}:{os.environ.get('MASTER_PORT', DEFAULT_PORT)}")
    return [*words, "--", *job] if words else []


def main(options: type[SingleNode], argv: Sequence[str], train: Path) -> int:
    """Check everything, then become torchrun; return only if there is nothing to run."""
    try:
        start = prepare(options, argv, train)
        if start.typed.dry_run:
            print(start.command)
            return 0
        wait_for_master(start.topology)
    except Refusal as refusal:
        print(f"evenkeel: {refusal}", file=sys.stderr)
        return REFUSED
    return start.command.execute()

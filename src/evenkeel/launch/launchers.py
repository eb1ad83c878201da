"""The command line of ``launch/single_node.py`` and ``launch/multi_node.py``: check it, then become torchrun."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from ..common.arguments import flag, one_line_errors, refuse_empty, some_options
from ..common.display import announce, show
from ..common.errors import FAILED, REFUSED, Refusal
from ..common.keyboard import CtrlC
from ..common.network import Link, find_link, meet
from ..common.processes import die_with_parent
from ..config import OPTION_NAMES, Config, Flag, MaybePath, check_numbers, devices_per_rank, option
from .agent import mirror_in
from .topology import (
    CPU_PROCESSES,
    DEFAULT_PORT,
    JOIN_SECONDS,
    Command,
    Topology,
    parse_master,
    parse_nodes,
    refuse_useless_gpus,
    torchrun,
)

T = TypeVar("T")

PASSED_ON = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT", "NCCL_", "OMP_NUM_")
"""Beginnings of the names of variables that a container gets from the environment of who starts it."""

OTHER_NAMES = {
    **{flag(name): f"-- {flag(name)}" for name in OPTION_NAMES},  # typed before the --
    **dict.fromkeys(("--node", "--nnodes", "--num-nodes", "--num_nodes"), "--nodes"),
    **dict.fromkeys(("--gpu", "--nproc-per-node", "--nproc_per_node", "--gpus-per-node", "--num-gpus"), "--gpus"),
    **dict.fromkeys(("--master-addr", "--master_addr", "--rdzv-endpoint", "--rdzv_endpoint"), "--master"),
    "--node_rank": "--node-rank",
}
"""Names of options of train.py and of other launchers -> what to type here."""

Count = tyro.conf.arg(metavar="N", help_behavior_hint="")
Gpus = Annotated[int | None, tyro.conf.arg(aliases=["-g"], metavar="N", help_behavior_hint="")]


@dataclass(frozen=True)
class MultiNode:
    """Start this node's part of a training job. Options after -- are passed to train.py.

      launch/single_node.py -g 4 -- --epochs 5                              four processes here; default: one per GPU
      launch/multi_node.py -n 2 -g 4 -nr 0 --master node0 -- --epochs 5     on the first of two nodes
      launch/multi_node.py -n 2 -g 4 -nr 1 --master node0 -- --epochs 5     on the second
      launch/multi_node.py -n 2:4 -nr 3 --master 10.0.0.1:29501 -- ...      elastic: runs on 2, 3 or 4 nodes

    The nodes may start in any order. All nodes but node 0 may leave an elastic job and come back. The launcher becomes
    torchrun, so signals reach torchrun directly. Exit code: 0 finished, 75 stopped and can be continued, 2 refused, 137
    killed, 1 a FAIL of --doctor; anything else is a bug.
    """

    gpus: Gpus = option(None, 1, 1024)
    """GPUs per node, each with a process (unless --place says otherwise). Default: all. Without GPUs: processes, 2."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = option(3, 0)
    """Maximum restarts of a node's processes after the death of one of them or of another node."""
    script: MaybePath = None
    """Run this file instead of train.py."""
    dry_run: Flag = False
    """Print the exact command and its environment; start nothing."""
    doctor: Flag = False
    """First run `evenkeel doctor` on the same ranks; start nothing if it finds a FAIL."""
    nodes: Annotated[str, tyro.conf.arg(aliases=["-n"], metavar="N|MIN:MAX")] = "1"
    """Number of nodes. MIN:MAX for an elastic job, which may lose and gain nodes while it runs."""
    node_rank: Annotated[int | None, tyro.conf.arg(aliases=["-nr"]), Count] = option(None, 0, 2**16)
    """Rank of this node, from 0. Node 0 hosts the rendezvous."""
    master: Annotated[str | None, tyro.conf.arg(metavar="HOST[:PORT]", help_behavior_hint="")] = None
    """Address by which the other nodes reach node 0; the same on every node. Default port: 29500."""
    run_id: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """Name of the rendezvous; the same on every node. Default: evenkeel-PORT."""
    join_timeout: Annotated[int, tyro.conf.arg(metavar="SECONDS")] = option(JOIN_SECONDS, 1, JOIN_SECONDS)
    """Seconds that nodes wait for each other, at the start and after a loss."""

    @property
    def topology(self) -> Topology:
        """The topology as typed; one process per node without -g."""
        min_nodes, max_nodes = parse_nodes(self.nodes)
        if self.doctor and min_nodes < max_nodes:
            raise Refusal(
                f"--doctor -n {self.nodes}: nodes that join later are not checked; use -n {min_nodes}, or no --doctor"
            )
        host, port = parse_master(self.master) if self.master is not None else ("", DEFAULT_PORT)
        rank, run_id = self.node_rank or 0, self.run_id
        limits = (self.max_restarts, self.join_timeout)
        topology = Topology(self.gpus or 1, min_nodes, max_nodes, rank, host, port, run_id, *limits)
        if max_nodes > 1 and self.node_rank is None:
            raise Refusal(f"-nr is missing: with -n {self.nodes} give each node its own, from 0")
        return topology


def parse_arguments(options: type[T], argv: Sequence[str]) -> tuple[T, list[str]]:
    """Split at the first ``--`` into the launcher's options and train.py's; refuse bad ones."""
    cut = argv.index("--") if "--" in argv else len(argv)
    refuse_empty(argv[:cut], options)
    text = inspect.getdoc(options)  # else tyro joins the lines of the examples
    parsed = one_line_errors(
        lambda: tyro.cli(options, args=argv[:cut], description=text),
        hint="see --help; options for train.py come after --",
        synonyms=OTHER_NAMES,
    )
    check_numbers(parsed)
    return parsed, list(argv[cut + 1 :])


def check_train_options(train_args: Sequence[str]) -> Config:
    """Parse train.py's options here, so that a bad one is refused once instead of by every process."""
    from ..tasks.command_line import parse  # imports torch, which takes seconds: after the cheap refusals

    return parse(train_args)[0]


def option_words(name: str, value: Any) -> list[str]:
    """An option of train.py, by its name in config.toml, as words of a command line; none for None."""
    if isinstance(value, bool):  # train.py's own switches have no --no-; those of a task have
        return [flag(name) if value else f"--no-{flag(name)[2:]}"] * (value or name not in OPTION_NAMES)
    if isinstance(value, (list, tuple)):
        if name == "tracker":  # may be given several times, while other lists follow one flag
            return [f"{flag(name)}={item}" for item in value]
        return [flag(name), *map(str, value)]
    return [] if value is None else [f"{flag(name)}={value}"]


def processes_of_node(config: Config | None, asked: int | None, given: int | None = None, nodes: int = 1) -> int:
    """How many processes to start on this node.

    Args:
        config: train.py's options; None for another script.
        asked: -g: GPUs to use, or processes if this node has no GPUs.
        given: GPUs that a cluster has allocated to the job; None: all of this node.
        nodes: of the job, at most.

    Raises:
        Refusal: too few GPUs, or not a multiple of what each process uses.
    """
    import torch  # takes seconds: not before the cheap refusals

    from ..distributed.data_parallel import refuse_company
    from ..distributed.devices import explain_devices

    refuse_useless_gpus()
    present, each = torch.cuda.device_count() if torch.cuda.is_available() else 0, 1
    if config:
        each = devices_per_rank(config)
        if config.strategy == "dp":
            asked = asked or 1
            refuse_company(asked * nodes, present)
    asked = given if asked is None else asked
    if not present:
        if asked is None:
            print(f"evenkeel: no GPU here: {CPU_PROCESSES} processes on the CPU; -g sets how many", file=sys.stderr)
        return asked or CPU_PROCESSES
    typed, wanted = ("", present) if asked is None else (f"-g {asked}: ", asked)
    if max(wanted, each) > present and not (config and config.share_gpu):
        raise Refusal(typed + explain_devices(max(1, wanted // each), present, each))
    if asked is not None and asked % each:
        raise Refusal(f"{typed}each process uses {each} GPUs (--place or --model-parallel); give a multiple of it")
    return max(1, wanted // each)


def link_of(topology: Topology) -> Link:
    """How the other nodes reach this one."""
    host, port = topology.master_host, topology.master_port
    return find_link(host, port, is_master=topology.node_rank == 0) if host else Link("127.0.0.1")


def wait_for_master(topology: Topology, fetches: bool) -> None:
    """Wait until node 0 answers; where this node `fetches`, the agent does so later. On node 0: check that its port is
    free."""
    is_master, patience = topology.node_rank == 0, topology.join_seconds
    if topology.master_host and (is_master or not fetches):
        meet(topology.master_host, topology.master_port, is_master=is_master, patience=patience)


@dataclass(frozen=True)
class Start:
    """This node's share of a job, checked and ready to start."""

    typed: MultiNode
    topology: Topology
    link: Link
    command: Command
    config: Config | None  # train.py's options; None with --script
    fetches: bool  # before it waits for the other nodes: with --mirror, but the doctor needs them first


def prepare(argv: Sequence[str], train: Path) -> Start:
    """Turn a launcher's command line into what it starts; `train` is the path of train.py."""
    typed, train_args = parse_arguments(MultiNode, argv)
    topology, script = typed.topology, typed.script or train
    if not script.is_file():
        raise Refusal(f"--script {script}: no such file")
    config = None if typed.script else check_train_options(train_args)
    topology = replace(topology, gpus=processes_of_node(config, typed.gpus, nodes=topology.max_nodes))
    try:
        link = link_of(topology)
    except Refusal as refusal:
        if not typed.dry_run:
            raise
        print(f"evenkeel: {refusal}; the command below lacks this node's address", file=sys.stderr)
        link = Link("")
    fetches = mirror_in(train_args) and not typed.doctor
    return Start(typed, topology, link, torchrun(topology, link, script, train_args), config, fetches)


def doctor_says(command: Command, of_train: bool = True) -> int:
    """Run `evenkeel doctor` on the ranks of a command; `of_train`: with train.py's options. 0: the job may start."""
    words = command.argv
    cut = words.index("--")
    # a rendezvous of its own, so that it never joins that of a running job
    own = (f"--rdzv-id={words[words.index('--rdzv-id') + 1]}-doctor", "--max-restarts=0")
    train_args = words[cut + 2 :] if of_train else ()
    checked = (*words[:cut], *own, "-m", "--", "evenkeel", "doctor", "--timeout=30", "--", *train_args)
    with CtrlC():  # torchrun gets it as well, and ends its ranks
        ending = partial(die_with_parent, signal.SIGTERM, os.getpid())
        code = subprocess.run(checked, env={**os.environ, **command.env}, preexec_fn=ending, check=False).returncode
    if code in (FAILED, REFUSED):
        print("evenkeel: --doctor: the job is not started", file=sys.stderr)
        return FAILED
    return code


def topology_in(arguments: Sequence[str]) -> list[str]:
    """Turn ``train.py -n 2 -g 4 -nr 0 ...`` into a launcher's command line; empty if it names no topology.

    That was the command line of jobs by ``torch.multiprocessing.spawn``, and people still type it. Such jobs found node
    0 by MASTER_ADDR and MASTER_PORT, which therefore count here where there is no --master.

    Raises:
        Refusal: torchrun has started this process, and so the others.
    """
    typed, job = some_options(arguments, ("-n", "--nodes"), ("-g", "--gpus"), ("-nr", "--node-rank"), ("--master",))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in vars(typed).items() if value is not None]
    if words and "RANK" in os.environ:
        raise Refusal(f"{words[0]}: torchrun has started the ranks; leave it out, or type python instead of torchrun")
    if words and typed.master is None and (host := os.environ.get("MASTER_ADDR")) and typed.nodes not in (None, "1"):
        words.append(f"--master={host}:{os.environ.get('MASTER_PORT', DEFAULT_PORT)}")
    return [*words, "--", *job] if words else []


def main(argv: Sequence[str], train: Path) -> int:
    """Check everything, then become torchrun; return only if there is nothing to run."""
    announce()
    start = prepare(argv, train)
    if start.typed.dry_run:
        show(start.command.explained())
        return 0
    wait_for_master(start.topology, start.fetches)
    if start.typed.doctor and (code := doctor_says(start.command, start.config is not None)):
        return code
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})  # for `agent.heed_signals`
    return start.command.execute()

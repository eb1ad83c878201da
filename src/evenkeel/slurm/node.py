"""One node's share of a Slurm job: a task that runs torchrun's agent, which starts a rank for each GPU.

So a rank that crashes is started again within the job, and the job's end has one exit code, by which slurm/job.sh
decides whether it comes back.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .. import agent
from ..checkpoint import Checkpoints
from ..config import Config
from ..errors import REFUSED, Ended, Refusal, exit_code
from ..files import write_json
from ..interruption import STOPPED
from ..launch import LARGEST_WORLD, Command, Topology, parse_master, parse_nodes
from ..launchers import check_job, check_train_options, command_for, parse_arguments, processes_of_node, wait_for_master
from ..records import read_facts
from .commands import SlurmError, slurm
from .record import JobRecord, load

MAX_REQUEUES = 5
"""Starts of a job that may come to nothing, one after another."""

BEFORE_THE_START = 200
"""Added to the exit code of a node that has refused, or failed before it had ranks. srun ends with the highest code of
its tasks, and others may be stopped because this one does not come."""


@dataclass(frozen=True)
class Step:
    """This process's place in Slurm's step."""

    job_id: str
    """Of the form 17, or 17_2 in an array."""
    requeues: int
    nodes: int
    node: int
    """0 .. nodes-1; the first is where the nodes meet."""
    gpus: int | None
    """That Slurm has given to this job on this node; None: it knows of none."""
    cores: int
    """The same; 0: unknown."""
    master: str
    """HOST:PORT, empty for a single node."""

    @staticmethod
    def from_environment() -> Step:
        """Read Slurm's variables, and those of slurm/job.sh.

        Raises:
            Refusal: this is no task of a step, or not one for each node.
        """
        env = os.environ
        if "SLURM_STEP_NODELIST" not in env:
            raise Refusal("slurm/node.py is a task of a Slurm job: srun --ntasks-per-node=1 slurm/node.py -- OPTIONS")
        nodes, tasks = int(env["SLURM_STEP_NUM_NODES"]), int(env["SLURM_STEP_NUM_TASKS"])
        if nodes != tasks:
            raise Refusal(f"{tasks} tasks on {nodes} nodes: start one for each node, with srun --ntasks-per-node=1")
        return Step(
            job_id=_job_id(),
            requeues=int(env.get("SLURM_RESTART_COUNT", "0")),
            nodes=nodes,
            node=int(env["SLURM_NODEID"]),
            gpus=int(env["SLURM_GPUS_ON_NODE"]) if env.get("SLURM_GPUS_ON_NODE") else None,
            cores=int(env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_ON_NODE") or "0"),
            master="" if nodes == 1 else env.get("EVENKEEL_MASTER") or _meeting(env["SLURM_STEP_NODELIST"]),
        )


@dataclass(frozen=True)
class Node:
    """What each node of a job does; submit.py pickles it for submitit, and node.py makes it from its command line."""

    script: Path
    train_args: tuple[str, ...]
    gpus: int | None = None
    max_restarts: int = 3
    max_requeues: int = MAX_REQUEUES
    folder: Path | None = None
    """For the job's own files; None: in the run's folder."""

    def __call__(self) -> int:
        """Work until the job is finished or stopped; ends the process by the verdict unless that is 0."""
        agent.heed_signals()  # submitit's own handlers would requeue at once and save nothing
        preparation = _Preparation(self)
        code = exit_code(preparation)
        started = code == 0
        if started:
            code = self._run(preparation)
        final = code == REFUSED or not started
        if code and final and "EVENKEEL_LAUNCH" in os.environ:
            if preparation.may_come_back:
                code = STOPPED
            else:
                _forbid_requeues()
                code += BEFORE_THE_START
        if code:
            sys.exit(code)
        return 0

    def _run(self, ready: _Preparation) -> int:
        os.environ.update(ready.command.env)
        code = agent.main(list(ready.command.argv[3:]))
        if code not in (0, STOPPED, REFUSED, agent.KILLED):
            _explain(ready.record, ready.step)
        return code


class _Preparation:
    """All that may be refused, or fail, before this node's ranks exist."""

    step: Step
    record: JobRecord
    command: Command

    def __init__(self, node: Node) -> None:
        self.node = node
        self.may_come_back = False
        """Whether another start may go better: this one is itself a requeue, and is counted among those that come to
        nothing. What was right before may be wrong now for a while: a GPU that is lost, a lock of a dead node."""

    def __call__(self) -> int:
        node = self.node
        self.step = step = Step.from_environment()
        config = check_train_options(node.train_args)
        assert config.run_dir is not None  # resolved
        self.record = self._record(config.run_dir.absolute())
        if step.node == 0:
            self.record.save()
            _count_start(self.record, step, config, node.max_requeues)
        self.may_come_back = step.requeues > 0
        check_job(node.train_args)
        # Slurm says 0 GPUs where it was asked for none, which is not what anybody types
        gpus = processes_of_node(config, node.gpus, step.gpus or None)
        host, port = parse_master(step.master) if step.master else ("", 0)
        topology = Topology(
            gpus,
            step.nodes,
            step.nodes,
            node_rank=step.node,
            master_host=host,
            master_port=port or 1,
            run_id=f"slurm-{step.job_id}-{step.requeues}",
            max_restarts=node.max_restarts,
        )
        errors = self.record.errors(step.requeues) / f"node-{step.node}"
        errors.mkdir(parents=True, exist_ok=True)
        os.environ[LARGEST_WORLD] = str(gpus * parse_nodes(self.record.nodes)[1])
        self.command = command_for(topology, node.script, node.train_args, cores=step.cores, log_dir=errors)
        wait_for_master(topology)
        return 0

    def _record(self, run_dir: Path) -> JobRecord:
        step = self.step
        with contextlib.suppress(OSError, ValueError):  # half-written, on a disk that was full
            known = load(run_dir)
            if known and known.job_id == step.job_id:
                return known
        return JobRecord(
            job_id=step.job_id,
            run_dir=str(run_dir),
            folder=str(self.node.folder or run_dir / "slurm" / f"job-{step.job_id}"),
            log=_log(step.job_id),
            nodes=str(step.nodes),
            gpus=self.node.gpus,
            revision="",
            train_args=self.node.train_args,
            submitted=time.time(),
        )


@dataclass(frozen=True)
class NodeCommand:
    """Start this node's share of a job: one task of srun on each node. What comes after -- goes to train.py as it is.

      srun --ntasks-per-node=1 slurm/node.py -- --epochs 5        inside of salloc or a script of your own

    slurm/submit.py and slurm/train.sbatch do this for you, and come back after time limits and preemptions.
    """

    gpus: Annotated[int | None, tyro.conf.arg(aliases=["-g"], metavar="N", help_behavior_hint="")] = None
    """GPUs of each node, one for each process or as --place says. Default: those given; without any, 2 processes."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """How often this node may start its processes again after one of them has died."""
    max_requeues: Annotated[int, tyro.conf.arg(metavar="N")] = MAX_REQUEUES
    """How often the job may be requeued without having finished a step meanwhile."""


def main(argv: Sequence[str], script: Path) -> int:
    """The command line of slurm/node.py."""
    typed, train_args = parse_arguments(NodeCommand, argv)
    return Node(script, tuple(train_args), typed.gpus, typed.max_restarts, typed.max_requeues)()


def _count_start(record: JobRecord, step: Step, config: Config, most: int) -> None:
    """Note that the job starts, and at which step.

    Raises:
        Ended: too many starts have come to nothing; status.json says so as well.
    """
    run_dir = Path(record.run_dir)
    path = Path(record.folder) / f"starts-{record.job_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    (status, _), (before, _) = read_facts(run_dir / "status.json"), read_facts(path)
    saved = Checkpoints(run_dir / "checkpoints", config.keep, ("", "max")).newest_step()
    done = 0 if config.fresh and not before else max(saved, status.get("step", 0))
    starts = before.get("starts", 0) + 1 if before.get("step") == done else 1
    write_json(path, {"step": done, "starts": starts})
    if starts > most + 1 and step.requeues:
        reason = f"requeued {most} times without finishing a step after step {done} (--max-requeues {most})"
        write_json(run_dir / "status.json", {"world_sizes": []} | status | {"state": "failed", "reason": reason})
        raise Ended(f"{reason}; logs are in {record.log} and {run_dir / 'logs'}; submit it again to go on")


def _job_id() -> str:
    """By which Slurm knows this job. A task of an array has a number too, but the last one's is the whole array's."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]


def _forbid_requeues() -> None:
    """Have the controller remember that this job is not to come back.

    Exit codes cannot say it: other nodes wait for this one, and when srun has killed them it ends with 137.
    """
    try:
        slurm("scontrol", "update", f"JobId={_job_id()}", "Requeue=0")
    except SlurmError as error:
        print(f"evenkeel: requeues cannot be switched off: {error}", file=sys.stderr, flush=True)


def _explain(record: JobRecord, step: Step) -> None:
    """Put into status.json what failed first: its writer, rank 0, may have known only that it lost a peer."""
    path = Path(record.run_dir) / "status.json"
    lines = agent.first_error([record.errors(step.requeues)]).strip().splitlines()
    if lines and path.exists():
        write_json(path, {"world_sizes": []} | read_facts(path)[0] | {"state": "failed", "reason": lines[-1]})


def _meeting(nodes: str) -> str:
    """HOST:PORT where the nodes of a step meet, the same on all of them, if slurm/job.sh has not said it."""
    env = os.environ
    try:
        first = slurm("scontrol", "show", "hostnames", nodes).split()[0]
        known = slurm("scontrol", "show", "node", "--oneliner", first)
    except SlurmError as error:
        raise Refusal(f"where node 0 is cannot be found out: {error}") from None
    address = re.search(r" NodeAddr=(\S+)", known)
    port = 20000 + (int(env["SLURM_JOB_ID"]) * 37 + int(env.get("SLURM_STEP_ID", "0")) * 7) % 12000
    host = address[1] if address else first
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _log(job: str) -> str:
    """Where Slurm writes what a job prints."""
    try:
        found = re.search(r"^ *StdOut=(.+)$", slurm("scontrol", "show", "job", job), re.MULTILINE)
    except SlurmError:
        return ""
    return found[1] if found else ""

"""One node's share of a Slurm job: a task that runs torchrun's agent, which starts a rank for each GPU.

So a crashed rank is restarted within the job. The job ends with one exit code, by which job.sh decides whether to
requeue it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from ...common.arguments import LARGEST_WORLD
from ...common.errors import FAILED, REFUSED, Ended, Refusal
from ...common.files import write_json
from ...config import Config, Flag, option, saved_options
from ...distributed.exits import exit_code
from ...resilience.interruption import STOPPED
from ...run import identity, run_directory
from ...run.checkpoint import Checkpoints
from ...run.launch_token import is_restart, launch_token
from ...run.records import read_facts
from .. import agent, launchers
from ..launchers import Gpus, check_train_options, link_of, parse_arguments, processes_of_node, wait_for_master
from ..topology import Command, Topology, endpoint, parse_master, parse_nodes, torchrun
from .jobs import JobRecord, SlurmError, load, slurm

MAX_REQUEUES = 5  # consecutive requeues without a finished step

# Added to the exit code of a node that was refused or failed before it had ranks. srun ends with the highest code of
# its tasks, and other nodes may be stopped because this one is missing.
BEFORE_THE_START = 200


@dataclass(frozen=True)
class Node:
    """One node's work in a job. submit.py pickles it for submitit; node.py makes it from its command line."""

    script: Path
    train_args: tuple[str, ...]
    gpus: int | None = None
    max_restarts: int = 3
    max_requeues: int = MAX_REQUEUES
    folder: Path | None = None  # for the job's own files; None: in the run's folder
    doctor: bool = False  # check the nodes before each start

    def __call__(self) -> int:
        """Run this node's share; ends the process with the job's exit code unless that is 0."""
        agent.heed_signals()  # submitit's own handlers would requeue at once and save nothing
        share = _Share(self)
        code = exit_code(share.prepare)
        started = code == 0
        if started:
            code = share.run()
        if (code == REFUSED or (code == FAILED and not started)) and "EVENKEEL_LAUNCH" in os.environ:
            if share.may_come_back:
                code = STOPPED
            else:
                _forbid_requeues()
                code += BEFORE_THE_START
        if code:
            sys.exit(code)
        return 0


class _Share:
    record: JobRecord
    command: Command

    def __init__(self, node: Node) -> None:
        self.node = node
        self.start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.may_come_back = False
        """Whether another start may succeed: this one is a counted requeue, so its failure may be temporary, such as a
        lost GPU or the lock of a dead node."""

    def prepare(self) -> int:
        """Do everything that may be refused or fail before this node has ranks; returns the doctor's exit code."""
        node, env = self.node, os.environ
        if "SLURM_STEP_NODELIST" not in env:
            raise Refusal("slurm/node.py is a task of a Slurm job: srun --ntasks-per-node=1 slurm/node.py -- OPTIONS")
        nodes, tasks = int(env["SLURM_STEP_NUM_NODES"]), int(env["SLURM_STEP_NUM_TASKS"])
        if nodes != tasks:
            raise Refusal(f"{tasks} tasks on {nodes} nodes: start one for each node, with srun --ntasks-per-node=1")
        job_id, rank = _job_id(), int(env["SLURM_NODEID"])
        config = check_train_options(node.train_args)
        assert config.run_dir is not None  # resolved
        self.record = record = _record(node, job_id, nodes, config.run_dir.absolute())
        if rank == 0:
            record.save()
            _count_start(record, self.start, config, node.max_requeues)
        self.may_come_back = self.start > 0
        check_job(node.train_args)
        given = int(env.get("SLURM_GPUS_ON_NODE") or "0") or None  # Slurm says 0 where no GPUs were asked for
        gpus = processes_of_node(config, node.gpus, given, nodes)
        host, port = ("", 1) if nodes == 1 else parse_master(env.get("EVENKEEL_MASTER") or _meeting())
        run_id = f"slurm-{job_id}-{self.start}"
        topology = Topology(gpus, nodes, nodes, rank, host, port, run_id, node.max_restarts)
        errors = record.errors(self.start) / f"node-{rank}"
        errors.mkdir(parents=True, exist_ok=True)
        env[LARGEST_WORLD] = str(gpus * parse_nodes(record.nodes)[1])
        cores = int(env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_ON_NODE") or "0")
        link = link_of(topology)

        def meet(topology: Topology, fetches: bool = False) -> Command:
            wait_for_master(topology, fetches)
            return torchrun(topology, link, node.script, node.train_args, cores=cores, log_dir=errors)

        # at another port, because the doctor's store on another node may live a moment longer than the doctor
        if node.doctor and (code := launchers.doctor_says(meet(replace(topology, master_port=port + 1)))):
            return code
        self.command = meet(topology, agent.mirror_in(node.train_args))
        return 0

    def run(self) -> int:
        """Run torchrun's agent in this process. Then write the first failure to status.json: rank 0, its writer, may
        know only that it lost a peer."""
        os.environ.update(self.command.env)
        # Slurm requeues a job whose node it loses. If node 0 has failed, its code must be the highest of all.
        try:
            code = agent.main(list(self.command.argv[3:]), lost=FAILED, again=FAILED)
        finally:
            wrong = _report_wrong_nodes(Path(self.record.run_dir))
        if code == FAILED and wrong & _nodes():
            return STOPPED  # the job goes on without them
        if code in (0, STOPPED, REFUSED, agent.KILLED):
            return code
        path = Path(self.record.run_dir) / "status.json"
        lines = agent.first_error([self.record.errors(self.start)]).strip().splitlines()
        if lines and path.exists():
            run_directory.mark_failed(path, lines[-1])
        return code


def _record(node: Node, job_id: str, nodes: int, run_dir: Path) -> JobRecord:
    """The job's record: from submit.py, or a new one for a job that sbatch or salloc started."""
    with contextlib.suppress(OSError, ValueError):  # half-written, on a disk that was full
        known = load(run_dir)
        if known and known.job_id == job_id:
            return known
    log = None
    with contextlib.suppress(SlurmError):
        log = re.search(r"^ *StdOut=(.+)$", slurm("scontrol", "show", "job", job_id), re.MULTILINE)
    folder = node.folder or run_dir / "slurm" / f"job-{job_id}"
    return JobRecord(job_id, str(run_dir), str(folder), log[1] if log else "", str(nodes), "", time.time())


def check_job(train_args: Sequence[str]) -> Config:
    """Refuse bad options of train.py, and a run directory that may not hold this run."""
    from ...tasks.command_line import parse  # imports torch

    config, task = parse(train_args)
    assert config.run_dir is not None  # resolved
    run = identity.Identity(saved_options(config, task.options()), task.harmless, earlier=task.earlier)
    identity.prepare_folder(config.run_dir, run, config.fresh)
    return config


def _count_start(record: JobRecord, start: int, config: Config, most: int) -> None:
    """Count the starts at the present step; after too many without progress, give up and note it in status.json."""
    run_dir = Path(record.run_dir)
    path = Path(record.folder) / f"starts-{record.job_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    (status, _), (before, _) = read_facts(run_dir / "status.json"), read_facts(path)
    if status.get("state") == "finished" and is_restart(status, [launch_token()]):
        return  # by an earlier start of this job: there are no steps to finish
    saved = Checkpoints(run_dir / "checkpoints", config.keep).newest_step()
    done = 0 if config.fresh and not before else max(saved, status.get("step", 0))
    starts = before.get("starts", 0) + 1 if before.get("step") == done else 1
    write_json(path, {"step": done, "starts": starts})
    if starts > most + 1 and start:
        reason = f"requeued {most} times without finishing a step after step {done} (--max-requeues {most})"
        run_directory.mark_failed(run_dir / "status.json", reason)
        raise Ended(f"{reason}; logs are in {record.log} and {run_dir / 'logs'}; submit it again to continue")


def _job_id() -> str:
    """Slurm's id of this job. A task of an array also has a plain number, but the last task has the whole array's."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"]


def _report_wrong_nodes(run_dir: Path) -> set[str]:
    """Nodes that twice computed wrong (--verify-every) or held up all others in a hang; job.sh has them left out."""
    known = read_facts(run_dir / "status.json")[0].get("wrong_nodes", {})
    wrong = {node for node, times in known.items() if times > 1}
    if file := os.environ.get("EVENKEEL_WRONG_NODES"):
        with contextlib.suppress(OSError):  # only on the first node, and not in a container, is it the one of job.sh
            Path(file).write_text(",".join(sorted(wrong)))
    return wrong


def _nodes() -> set[str]:
    """The names of this job's nodes; empty if Slurm does not answer."""
    with contextlib.suppress(SlurmError):
        return set(slurm("scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split())
    return set()


def _forbid_requeues() -> None:
    """Forbid requeues at the controller. An exit code cannot: srun kills the waiting nodes, and ends with 137."""
    try:
        slurm("scontrol", "update", f"JobId={_job_id()}", "Requeue=0")
    except SlurmError as error:
        print(f"evenkeel: cannot forbid requeues: {error}", file=sys.stderr, flush=True)


def _meeting() -> str:
    """HOST:PORT where the nodes of a step meet, the same on all of them, if job.sh has not set it."""
    try:
        first = slurm("scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split()[0]
        known = slurm("scontrol", "show", "node", "--oneliner", first)
    except SlurmError as error:
        raise Refusal(f"cannot find the address of node 0: {error}") from None
    address = re.search(r" NodeAddr=(\S+)", known)
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_STEP_ID", "0"))
    return endpoint(address[1] if address else first, 20000 + (job * 37 + step * 7) % 12000)


@dataclass(frozen=True)
class NodeCommand:
    """Start this node's part of a training job: one task of srun per node. Options after -- are passed to train.py.

      srun --ntasks-per-node=1 slurm/node.py -- --epochs 5        in salloc or a script of your own

    slurm/submit.py and slurm/train.sbatch do this for you, and requeue the job after time limits and preemptions.
    """

    gpus: Gpus = option(None, 1, 1024)
    """GPUs per node, each with a process (unless --place says otherwise). Default: all. Without GPUs: processes, 2."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = option(3, 0)
    """Maximum restarts of a node's processes after one of them has died, within one start of the job."""
    max_requeues: Annotated[int, tyro.conf.arg(metavar="N")] = option(MAX_REQUEUES, 0)
    """Maximum consecutive requeues without a finished step."""
    doctor: Flag = False
    """First run `evenkeel doctor` on all nodes; a FAIL ends the job."""


def main(argv: Sequence[str], script: Path) -> int:
    """The command line of slurm/node.py; `script` is train.py."""
    typed, train_args = parse_arguments(NodeCommand, argv)
    return Node(script, tuple(train_args), typed.gpus, typed.max_restarts, typed.max_requeues, doctor=typed.doctor)()

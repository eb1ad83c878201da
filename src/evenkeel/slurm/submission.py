"""The command line of ``slurm/submit.py``: check all, copy the code, submit through submitit, say how to go on."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import submitit
import tyro

from ..errors import Refusal
from ..files import close_to_others, make_unused, unused
from ..launch import parse_nodes
from ..launchers import check_company, check_job, check_train_options, parse_arguments
from .cluster import Request, parse_time, partitions, show_time
from .code import copy_code
from .node import MAX_REQUEUES, Node
from .record import JobRecord

if TYPE_CHECKING:
    from ..config import Config

WARNING_SECONDS = 90
"""How long before its time limit a job is warned. Slurm may be a minute early; a snapshot may take --grace, 25 s."""

MOST_SEEDS = 10_000
"""Runs of one array. Slurm's own limit (MaxArraySize) is mostly 1,000."""

Words = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


@dataclass(frozen=True)
class Submit:
    """Submit a training job to Slurm. What comes after -- goes to train.py as it is.

      slurm/submit.py -n 2 -g 4 -- --epochs 90                    2 nodes, 4 processes on each
      slurm/submit.py -n 2:4 -g 8 --time 4h --follow -- ...       what there is, 2 to 4 nodes
      slurm/submit.py -g 1 --array-seeds 0:4 -- ...               four runs with seeds 0 to 3
      slurm/submit.py -n 2 -g 4 --dry-run -- ...                  only print the script

    A job that meets its time limit or is preempted saves its last finished step, is requeued, and goes on by itself,
    until it is finished. It runs a copy of the code as it is now.
    """

    nodes: Annotated[str, tyro.conf.arg(aliases=["-n"], metavar="N|MIN:MAX")] = "1"
    """How many nodes; MIN:MAX takes what there is at each start."""
    gpus: Annotated[int | None, tyro.conf.arg(aliases=["-g"], metavar="N", help_behavior_hint="")] = None
    """GPUs of each node, one a process or as --place says. Default: the partition's; without any, 2 processes."""
    partition: Words = None
    """Default: the cluster's."""
    account: Words = None
    """To be charged."""
    qos: Words = None
    """Quality of service."""
    time: Annotated[str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="")] = None
    """Longest time of one start: minutes, H:MM:SS, D-HH:MM:SS, or 90m, 12h, 2d. Default: what the partition allows."""
    cpus_per_gpu: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Cores for each process. Default: --num-workers + 1."""
    mem: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory of each node, 64G for example. Default: the partition's."""
    constraint: Words = None
    """Features that nodes must have."""
    exclude: Words = None
    """Nodes not to use."""
    nodelist: Words = None
    """Nodes to use."""
    container: Annotated[str | None, tyro.conf.arg(metavar="IMAGE", help_behavior_hint="")] = None
    """Run in this image, where the cluster has pyxis."""
    setup: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="LINE")] = ()
    """A line of shell before the start on the first node ("module load cuda"); may be given several times."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """How often a node may start its processes again after one of them has died, within one start of the job."""
    max_requeues: Annotated[int, tyro.conf.arg(metavar="N")] = MAX_REQUEUES
    """How often the job may be requeued without having finished a step meanwhile."""
    array_seeds: Annotated[str | None, tyro.conf.arg(metavar="FIRST:END", help_behavior_hint="")] = None
    """One run for each seed from FIRST to END-1, as an array, in RUN_DIR/seed-N."""
    name: Words = None
    """The job's name. Default: the run directory's."""
    folder: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """For the log, the copy of the code and tracebacks; all nodes must see it. Default: RUN_DIR/slurm."""
    follow: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Show the job's states and its log until it ends. Ctrl-C leaves it running."""
    dry_run: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Print the script for sbatch, and submit nothing."""


def main(argv: Sequence[str], repository: Path) -> int:
    """Check everything, submit, say how to go on."""
    typed, train_args = parse_arguments(Submit, argv)
    _check(typed)
    min_nodes, max_nodes = parse_nodes(typed.nodes)
    partition = typed.partition or os.environ.get("SBATCH_PARTITION")
    limit = (os.environ.get("SBATCH_TIMELIMIT") or None) if typed.time is None else typed.time
    asked = Request(min_nodes, max_nodes, typed.gpus, partition, parse_time(limit) if limit is not None else None)
    available = partitions()
    request = asked.against(available)
    run_dir = _run_dir(check_train_options(train_args))
    members = _members(typed, train_args, run_dir)
    configs = [check_train_options(member) if typed.dry_run else check_job(member) for member in members]
    for config in configs:
        check_company(config, (request.gpus or 1) * max_nodes)
    parent = (typed.folder or run_dir / "slurm").absolute()
    stamp = parent / time.strftime("%Y%m%d-%H%M%S")
    folder = unused(stamp) if typed.dry_run else make_unused(stamp)
    script = folder / "code" / "train.py"
    nodes = [
        Node(script, tuple(member), request.gpus, typed.max_restarts, typed.max_requeues, folder) for member in members
    ]
    _forget_other_jobs(typed)
    has_gpus = any(partition.gpus for partition in available if partition.name == request.partition)
    executor = _executor(typed, request, folder, repository, configs[0], has_gpus)
    if typed.dry_run:
        print(executor._make_submission_file_text(executor._submitit_command_str, ""))
        return 0
    revision = copy_code(repository, folder / "code", configs[0].task, leave_out=(run_dir, parent))
    submitted = time.time()  # what a run says later is this job's
    jobs = _submit(executor, nodes)
    _announce_plan(typed, request, revision)
    records = [
        JobRecord(
            job_id=job.job_id,
            run_dir=str(_run_dir(config).absolute()),
            folder=str(folder),
            log=str(job.paths.stdout),
            nodes=typed.nodes,
            gpus=request.gpus,
            revision=revision,
            train_args=node.train_args,
            submitted=submitted,
        )
        for job, node, config in zip(jobs, nodes, configs, strict=True)
    ]
    for record in records:
        record.save()
        _announce(record)
    if typed.follow:
        from .follow import follow

        return follow(records[0])
    return 0


def _check(typed: Submit) -> None:
    """Refuse what needs neither torch nor Slurm to be refused."""
    if typed.follow and typed.array_seeds:
        raise Refusal("--follow: shows one job; leave it out with --array-seeds, and follow a run by its folder")
    if typed.container and typed.array_seeds:
        raise Refusal("--container: not with --array-seeds, for which submitit runs the Python of this machine")
    if typed.mem is not None and not re.fullmatch(r"[0-9]{1,9}[KMGT]?", typed.mem, re.IGNORECASE):
        raise Refusal(f"--mem {typed.mem}: give a number with K, M, G or T, 64G for example")
    for name in ("partition", "account", "qos", "constraint", "exclude", "nodelist", "name", "container"):
        value = getattr(typed, name)
        if value is not None and (not value.strip() or "\n" in value):
            raise Refusal(f"--{name} {value!r}: must be one line and not empty")


def _members(typed: Submit, train_args: list[str], run_dir: Path) -> list[list[str]]:
    """The options of each run: one, or one for each seed."""
    if typed.array_seeds is None:
        return [train_args]
    bounds = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", typed.array_seeds)
    if not bounds or not 0 < int(bounds[2]) - int(bounds[1]) <= MOST_SEEDS:
        raise Refusal(
            f"--array-seeds {typed.array_seeds}: give FIRST:END with FIRST < END, {MOST_SEEDS} at most; 0:4 are seeds "
            "0, 1, 2 and 3"
        )
    if any(word == "--seed" or word.startswith("--seed=") for word in train_args):
        raise Refusal("--seed: not with --array-seeds, which gives each run its own")
    seeds = range(int(bounds[1]), int(bounds[2]))
    return [[*train_args, "--seed", str(seed), "--run-dir", str(run_dir / f"seed-{seed}")] for seed in seeds]


def _run_dir(config: Config) -> Path:
    assert config.run_dir is not None  # resolved
    return config.run_dir


def _forget_other_jobs(typed: Submit) -> None:
    """sbatch hands the environment on: that of a job in which this runs, or of a torchrun, is not the new job's.

    And it takes options from variables, before those in a script: only what is not in ours may come from there.
    """
    ours = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    said = ["PARTITION", "TIMELIMIT", "JOB_NAME", "OPEN_MODE", "OUTPUT", "ERROR", "REQUEUE", "NO_REQUEUE", "SIGNAL"]
    said += ["ARRAY_INX", "GPUS_PER_NODE", "EXPORT", "WCKEY"]
    said += [name.upper() for name in ("account", "qos", "constraint", "exclude", "nodelist") if getattr(typed, name)]
    said += ["MEM_PER_NODE"] if typed.mem else []
    for name in list(os.environ):
        other = name.startswith(("SLURM_", "TORCHELASTIC_", "SUBMITIT_")) and name not in ours
        if other or name in ranks or name in [f"SBATCH_{option}" for option in said]:
            del os.environ[name]


def _executor(
    typed: Submit, request: Request, folder: Path, repository: Path, config: Config, has_gpus: bool
) -> submitit.SlurmExecutor:
    """submitit's executor, with all that the script says."""
    processes = request.gpus or 2
    quiet = io.StringIO()
    with redirect_stderr(quiet):
        executor = submitit.SlurmExecutor(folder, python="python" if typed.container else None)
        executor.update_parameters(
            job_name=typed.name or _run_dir(config).name,
            partition=request.partition,
            account=typed.account,
            qos=typed.qos,
            time=request.minutes,
            nodes=request.min_nodes,
            gpus_per_node=processes if has_gpus else None,
            cpus_per_task=processes * (typed.cpus_per_gpu or config.num_workers + 1),
            mem=typed.mem,
            constraint=typed.constraint,
            exclude=typed.exclude,
            nodelist=typed.nodelist,
            signal_delay_s=WARNING_SECONDS,
            stderr_to_stdout=True,
            additional_parameters={"requeue": True} | _range(request),
            srun_args=_container(typed, repository, folder, config),
            setup=[*_preamble(folder, repository), *typed.setup],
        )
    return executor


def _range(request: Request) -> dict[str, Any]:
    return {"nodes": f"{request.min_nodes}-{request.max_nodes}"} if request.max_nodes > request.min_nodes else {}


def _container(typed: Submit, repository: Path, folder: Path, config: Config) -> list[str]:
    if not typed.container:
        return []
    seen = {str(path): None for path in (Path.cwd(), repository, folder, _run_dir(config).absolute())}
    return [
        f"--container-image={typed.container}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in seen)}",
        f"--container-workdir={Path.cwd()}",
    ]


def _preamble(folder: Path, repository: Path) -> list[str]:
    """The script's lines before srun."""
    code = folder / "code"
    exported = {
        "EVENKEEL_CODE": str(code),
        "EVENKEEL_ORIGIN": str(repository),
    }
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
        'export PYTHONPATH="$EVENKEEL_CODE/src${PYTHONPATH:+:$PYTHONPATH}"',
        f"source {shlex.quote(str(code / 'slurm' / 'job.sh'))}",
        f"evenkeel_probe {shlex.quote(str(folder))}",
    ]


def _submit(executor: submitit.SlurmExecutor, nodes: list[Node]) -> list[submitit.Job[int]]:
    """Submit one job, or an array.

    Raises:
        Refusal: in sbatch's words, on account, QOS, constraint, memory, names of nodes. Nothing is left.
    """
    told = io.StringIO()  # by submitit, beside the error that it raises
    try:
        with redirect_stderr(told), redirect_stdout(told):
            if len(nodes) > 1:
                jobs = executor.map_array(Node.__call__, nodes)
            else:
                jobs = [executor.submit(Node.__call__, nodes[0])]
    except submitit.core.utils.FailedJobError as error:
        shutil.rmtree(executor.folder, ignore_errors=True)
        with suppress(OSError):  # there are other submissions
            executor.folder.parent.rmdir()
        words = re.findall(r"^sbatch: error: (.*)$", f"{told.getvalue()}\n{error}", re.MULTILINE)
        reason = ": ".join(dict.fromkeys(words)) or str(error)
        raise Refusal(f"Slurm does not take the job: {reason}") from None
    for path in executor.folder.glob("*submi*"):  # these hold the options of train.py and the lines of --setup
        close_to_others(path)
    return jobs


def _announce_plan(typed: Submit, request: Request, revision: str) -> None:
    processes = "the GPUs given" if request.gpus is None else f"{request.gpus} processes"
    print(
        f"{typed.nodes} node{'s' * (typed.nodes != '1')} x {processes}, partition {request.partition}, "
        f"{show_time(request.minutes or 0)} for each start; code {revision or 'without git'}"
    )


def _announce(record: JobRecord) -> None:
    run_dir = Path(record.run_dir)
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    print(f"job {record.job_id} is submitted")
    print(f"  run      {shown}")
    print(f"  log      {shlex.quote(record.log.replace('_0_log', '_*_log'))}, a file for each node")
    print(f"  watch    python -m evenkeel follow {shlex.quote(str(shown))}")
    print(f"  cancel   scancel {record.job_id}", flush=True)

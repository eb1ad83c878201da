"""The command line of ``slurm/submit.py``: check everything, copy the code, submit through submitit."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import submitit
import tyro

from ...common.display import show
from ...common.errors import Refusal
from ...common.files import close_to_others, make_unused, unused
from ...config import Flag, MaybePath, option
from ..launchers import check_train_options, parse_arguments
from ..limits import DAY, check_memory, parse_time, show_time
from ..topology import parse_nodes
from .cluster import Partition, choose, partitions
from .code import copy_code
from .jobs import JobRecord, SlurmError
from .node import Node, NodeCommand, check_job

if TYPE_CHECKING:
    from ...config import Config

WARNING_SECONDS = 90  # before the time limit; Slurm may be a minute early, and a snapshot takes up to --grace, 25 s
JOB_SCRIPT = Path(__file__).with_name("job.sh")  # sourced by the scripts of all jobs
MOST_SEEDS = 10_000  # in one array; Slurm's own limit (MaxArraySize) is mostly 1,000

Words = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


@dataclass(frozen=True)
class Submit(NodeCommand):
    """Submit a training job to Slurm. Options after -- are passed to train.py.

      slurm/submit.py -n 2 -g 4 -- --epochs 90                    2 nodes, 4 processes on each
      slurm/submit.py -n 2:4 -g 8 --time 4h --follow -- ...       2 to 4 nodes, as many as are free
      slurm/submit.py -g 1 --array-seeds 0:4 -- ...               four runs with seeds 0 to 3
      slurm/submit.py -n 2 -g 4 --dry-run -- ...                  print the script

    A job that reaches its time limit or is preempted saves its last finished step, is requeued, and continues
    automatically until it is finished. It runs a copy of the present code.
    """

    nodes: Annotated[str, tyro.conf.arg(aliases=["-n"], metavar="N|MIN:MAX")] = "1"
    """Number of nodes. MIN:MAX takes as many as are free at each start."""
    partition: Words = None
    """Partition to use. Default: the cluster's default."""
    account: Words = None
    """Account to charge."""
    qos: Words = None
    """Quality of service."""
    time: Annotated[str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="")] = None
    """Time limit of one start: minutes, H:MM:SS, D-HH:MM:SS, or 90m, 12h, 2d. Default: the partition's limit."""
    cpus_per_gpu: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = option(None, 1, 4096)
    """CPU cores per process. Default: --num-workers + 1."""
    mem: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory per node, such as 64G. Default: the partition's."""
    constraint: Words = None
    """Features that the nodes must have."""
    exclude: Words = None
    """Nodes not to use."""
    nodelist: Words = None
    """Nodes to use."""
    container: Annotated[str | None, tyro.conf.arg(metavar="IMAGE", help_behavior_hint="")] = None
    """Run in this image; the cluster must have pyxis."""
    setup: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="LINE")] = ()
    """Shell line to run on the first node before the start, such as "module load cuda"; may be repeated."""
    array_seeds: Annotated[str | None, tyro.conf.arg(metavar="FIRST:END", help_behavior_hint="")] = None
    """One run per seed from FIRST to END-1, as a job array, in RUN_DIR/seed-N."""
    name: Words = None
    """Name of the job. Default: that of the run directory."""
    folder: MaybePath = None
    """Folder for logs, the copy of the code and tracebacks, visible to all nodes. Default: RUN_DIR/slurm."""
    doctor: Flag = False
    """Before each start run `evenkeel doctor` on all nodes of the job; a FAIL ends the job."""
    follow: Flag = False
    """Show the job's state and log until it ends. Ctrl-C leaves it running."""
    dry_run: Flag = False
    """Print the script for sbatch and submit nothing. Also works without Slurm, but then checks no limits."""


def main(argv: Sequence[str], repository: Path) -> int:
    """Check everything, submit the job, and print how to watch it."""
    typed, train_args = parse_arguments(Submit, argv)
    _check(typed)
    minutes, most = _minutes(typed.time), parse_nodes(typed.nodes)[1]
    name = typed.partition or os.environ.get("SBATCH_PARTITION")
    partition = _partition(typed, name, most, minutes)
    minutes, gpus = minutes or partition.minutes or DAY, typed.gpus or partition.gpus or None
    config = check_train_options(train_args)
    run_dir = _run_dir(config)
    members = _members(typed, train_args, config)
    from ...distributed.data_parallel import refuse_company  # imports torch, as parsing train.py's options does

    configs = [check_train_options(member) if typed.dry_run else check_job(member) for member in members]
    if configs[0].strategy == "dp":
        refuse_company((gpus or 1) * most, gpus=0)
    folder = _folder(typed, run_dir, repository)
    _forget_other_jobs(typed)
    executor = _executor(typed, partition, minutes, folder, repository, configs[0])
    if typed.dry_run:
        show(executor._make_submission_file_text(executor._submitit_command_str, ""))
        return 0
    revision = copy_code(repository, folder / "code", configs[0].task, leave_out=(run_dir, folder.parent))
    shutil.copy2(JOB_SCRIPT, folder)
    submitted = time.time()  # later records of the run are this job's
    script, limits = folder / "code" / "train.py", (typed.max_restarts, typed.max_requeues)
    jobs = _submit(executor, [Node(script, tuple(member), gpus, *limits, folder, typed.doctor) for member in members])
    processes = "the GPUs allocated" if gpus is None else f"{gpus} processes"
    print(
        f"{typed.nodes} node{'s' * (typed.nodes != '1')} x {processes}, partition {partition.name}, "
        f"{show_time(minutes)} for each start; code {revision or 'without git'}"
    )
    for job, config in zip(jobs, configs, strict=True):
        run_dir = _run_dir(config).absolute()
        facts = (typed.nodes, revision, submitted)
        record = JobRecord(job.job_id, str(run_dir), str(folder), str(job.paths.stdout), *facts)
        record.save()
        shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
        print(f"job {record.job_id} is submitted")
        print(f"  run      {shown}")
        print(f"  log      {shlex.quote(record.log.replace('_0_log', '_*_log'))}, one file per node")
        print(f"  watch    python -m evenkeel follow {shlex.quote(str(shown))}")
        print(f"  cancel   scancel {record.job_id}", flush=True)
    if typed.follow:
        from .follow import follow

        return follow(run_dir) or 0
    return 0


def _minutes(typed: str | None) -> int | None:
    """The time limit of --time, else the environment's, if there is one."""
    if typed is not None:
        return parse_time(typed)
    limit = os.environ.get("SBATCH_TIMELIMIT")
    return parse_time(limit, "SBATCH_TIMELIMIT=") if limit else None


def _partition(typed: Submit, name: str | None, nodes: int, minutes: int | None) -> Partition:
    """The partition for the job; without Slurm, --dry-run takes the one that is typed."""
    try:
        return choose(partitions(), name, nodes, typed.gpus, minutes)
    except SlurmError as error:
        if not typed.dry_run:
            raise Refusal(f"no Slurm on this machine: {error}; launch/ starts jobs without Slurm") from None
        unchecked = "partition, nodes, -g (as GPUs) and --time are not checked"
        print(f"evenkeel: no Slurm on this machine: {error}; {unchecked}", file=sys.stderr, flush=True)
        return Partition(name or "", default=name is None, nodes=nodes, gpus=typed.gpus or 0, minutes=None)


class _Printer(submitit.SlurmExecutor):
    """submitit's executor for --dry-run, which needs no `srun`."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def _check(typed: Submit) -> None:
    """Checks that need neither torch nor Slurm."""
    if typed.follow and typed.array_seeds:
        raise Refusal("--follow: shows one job; leave it out with --array-seeds, and follow each run by its folder")
    if typed.container and typed.array_seeds:
        raise Refusal(
            "--container: does not work with --array-seeds, for which submitit runs the Python of this machine"
        )
    if typed.mem is not None:
        check_memory(typed.mem)
    for name in ("partition", "account", "qos", "constraint", "exclude", "nodelist", "name", "container"):
        value = getattr(typed, name)
        if value is not None and (not value.strip() or "\n" in value):
            raise Refusal(f"--{name} {value!r}: must be one line and not empty")


def _members(typed: Submit, train_args: list[str], config: Config) -> list[list[str]]:
    """train.py's options of each run: one, or one for each seed."""
    if typed.array_seeds is None:
        return [train_args]
    bounds = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", typed.array_seeds)
    if not bounds or not 0 < int(bounds[2]) - int(bounds[1]) <= MOST_SEEDS:
        raise Refusal(
            f"--array-seeds {typed.array_seeds}: give FIRST:END with FIRST < END, {MOST_SEEDS} at most; 0:4 means "
            "seeds 0, 1, 2 and 3"
        )
    if any(word == "--seed" or word.startswith("--seed=") for word in train_args):
        raise Refusal("--seed: leave it out with --array-seeds, which gives each run its own")
    seeds = range(int(bounds[1]), int(bounds[2]))
    if config.mirror and len(seeds) > 1:
        raise Refusal(
            f"--array-seeds {typed.array_seeds} --mirror {config.mirror}: each run needs a URL of its own; submit each "
            "by itself, with its --seed, --run-dir and --mirror"
        )
    folders = [_run_dir(config) / f"seed-{seed}" for seed in seeds]
    return [[*train_args, "--seed", str(seed), "--run-dir", str(it)] for seed, it in zip(seeds, folders, strict=True)]


def _run_dir(config: Config) -> Path:
    assert config.run_dir is not None  # resolved
    return config.run_dir


def _folder(typed: Submit, run_dir: Path, repository: Path) -> Path:
    """The new folder for the job's files."""
    parent = (typed.folder or run_dir / "slurm").absolute()
    if repository.resolve().is_relative_to(parent.resolve()):
        raise Refusal(f"--folder {typed.folder}: has the code in it, which is copied there; name a folder for the job")
    stamp = parent / time.strftime("%Y%m%d-%H%M%S")
    try:
        return unused(stamp) if typed.dry_run else make_unused(stamp)
    except OSError as error:
        raise Refusal(f"--folder {parent}: cannot be made: {error.strerror}; name another folder") from None


def _forget_other_jobs(typed: Submit) -> None:
    """Remove variables that sbatch would read: those of a job in which this runs, and those that override options of
    the script."""
    ours = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    script = "PARTITION TIMELIMIT JOB_NAME OPEN_MODE OUTPUT ERROR REQUEUE NO_REQUEUE SIGNAL ARRAY_INX GPUS_PER_NODE "
    said = {*(script + "EXPORT").split(), *(["MEM_PER_NODE"] if typed.mem else [])}
    said |= {name.upper() for name in ("account", "qos", "constraint", "exclude", "nodelist") if getattr(typed, name)}
    for name in list(os.environ):
        other = name.startswith(("SLURM_", "SUBMITIT_")) and name not in ours
        if other or (name.startswith("SBATCH_") and name.removeprefix("SBATCH_") in said):
            del os.environ[name]


def _executor(
    typed: Submit, partition: Partition, minutes: int, folder: Path, repository: Path, config: Config
) -> submitit.SlurmExecutor:
    """submitit's executor, with all settings of the script."""
    processes = typed.gpus or partition.gpus or 2
    code = folder / "code"
    preamble = [  # the script's lines before srun
        f"export EVENKEEL_CODE={shlex.quote(str(code))}",
        f"export EVENKEEL_ORIGIN={shlex.quote(str(repository))}",
        'export PYTHONPATH="$EVENKEEL_CODE/src${PYTHONPATH:+:$PYTHONPATH}"',
        f"source {shlex.quote(str(folder / JOB_SCRIPT.name))}",
        f"evenkeel_probe {shlex.quote(str(folder))}",
    ]
    container = []
    if typed.container:
        seen = dict.fromkeys(map(str, (Path.cwd(), repository, folder, _run_dir(config).absolute())))
        container = [
            f"--container-image={typed.container}",
            f"--container-mounts={','.join(f'{path}:{path}' for path in seen)}",
            f"--container-workdir={Path.cwd()}",
        ]
    least, most = parse_nodes(typed.nodes)
    with redirect_stderr(io.StringIO()):
        kind = _Printer if typed.dry_run else submitit.SlurmExecutor
        executor = kind(folder, python="python" if typed.container else None)
        executor.update_parameters(
            job_name=typed.name or _run_dir(config).name,
            partition=partition.name or None,
            account=typed.account,
            qos=typed.qos,
            time=minutes,
            nodes=least,
            gpus_per_node=processes if partition.gpus else None,
            cpus_per_task=processes * (typed.cpus_per_gpu or config.num_workers + 1),
            mem=typed.mem,
            constraint=typed.constraint,
            exclude=typed.exclude,
            nodelist=typed.nodelist,
            signal_delay_s=WARNING_SECONDS,
            wckey=None,  # the user's (SBATCH_WCKEY), and not submitit's
            stderr_to_stdout=True,
            additional_parameters={"requeue": True} | ({"nodes": f"{least}-{most}"} if most > least else {}),
            srun_args=container,
            setup=[*preamble, *typed.setup],
        )
    return executor


def _submit(executor: submitit.SlurmExecutor, nodes: list[Node]) -> list[submitit.Job[int]]:
    """Submit one job, or an array of several. If sbatch refuses, raise a Refusal with its message and leave nothing."""
    output = io.StringIO()  # submitit prints details that its error lacks
    mode = executor.folder.stat().st_mode & 0o777
    executor.folder.chmod(0o700)  # until the files below are closed: sbatch may take a while to answer
    try:
        with redirect_stderr(output), redirect_stdout(output):
            jobs: list[submitit.Job[int]] = executor.map_array(Node.__call__, nodes)
    except submitit.core.utils.FailedJobError as error:
        shutil.rmtree(executor.folder, ignore_errors=True)
        with suppress(OSError):  # there are other submissions
            executor.folder.parent.rmdir()
        words = re.findall(r"^sbatch: error: (.*)$", f"{output.getvalue()}\n{error}", re.MULTILINE)
        reason = ": ".join(dict.fromkeys(words)) or str(error)
        raise Refusal(f"Slurm refuses the job: {reason}") from None
    for path in executor.folder.glob("*submi*"):  # these hold the options of train.py and the lines of --setup
        close_to_others(path)
    executor.folder.chmod(mode)
    return jobs

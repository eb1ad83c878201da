"""Jobs of ours on the cluster: submitted as people do it, watched by what their runs leave."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from evenkeel.common.processes import process_name
from tests.cluster.cluster import Cluster, Process
from tests.support import processes
from tests.support.processes import ROOT, TRAIN, read, records
from tests.support.small_runs import TASK

SBATCH = ROOT / "slurm" / "train.sbatch"


def recorded(run_dir: Path, *more: object, epochs: int = 3) -> list[str]:
    shape = ["--epochs", epochs, "--batch-size", 12, "--micro-batch", 3, "--log-every", 1, "--reduce", "tree"]
    return [str(word) for word in ["--task", TASK, "--run-dir", run_dir, "--eval-every", 1000, *shape, *more]]


def submit(cluster: Cluster, *words: object, expect: int = 0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(cwd / "slurm" / "submit.py"), *map(str, words)]
    return processes.run(command, cwd, cluster.environment(), expect=expect)


def submitted(cluster: Cluster, *words: object, cwd: Path = ROOT) -> str:
    """The same; returns the job id."""
    found = re.search(r"^job (\S+) is submitted$", submit(cluster, *words, cwd=cwd).stdout, re.MULTILINE)
    return found[1]


def sbatch(cluster: Cluster, options: list[str], train_options: list[str], cwd: Path) -> str:
    """Type sbatch slurm/train.sbatch; returns the job id."""
    done = cluster.slurm("sbatch", "--parsable", *options, str(SBATCH), "--", *train_options, cwd=cwd)
    return done.strip()


def undisturbed(run_dir: Path, epochs: int) -> dict:
    """The summary of the same run in one process that nobody disturbs."""
    processes.run([sys.executable, str(TRAIN), *recorded(run_dir, "--wandb", "disabled", epochs=epochs)])
    return read(run_dir)


def wait_for_step(cluster: Cluster, job: str, run_dir: Path, step: int, attempts: int = 1) -> None:
    """Until an attempt of this number or a later one has finished a step of this number or a later one."""

    def there() -> bool:
        if not (run_dir / "metrics.jsonl").exists() or len(records(run_dir, "start")) < attempts:
            return False
        begun = records(run_dir, "start")[-1]["time"]
        return any(r["step"] >= step and r["time"] >= begun for r in records(run_dir, "train"))

    what = f"step {step} of attempt {attempts}"
    processes.wait_until(there, what, 180, lambda: f"{cluster.show(job)}\n{logs(run_dir)}", every=0.1)


def logs(run_dir: Path) -> str:
    files = sorted(run_dir.glob("slurm/*/*_log.out")) + sorted(run_dir.parent.glob("slurm-*.out"))
    return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in files)


def ended(cluster: Cluster, job: str, run_dir: Path, state: str = "COMPLETED") -> dict[str, str]:
    """Wait for a job's end in this state, and show its logs if it is another."""
    try:
        shown = cluster.wait_for(job, limit=300)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{logs(run_dir)}") from None
    assert shown["JobState"] == state, f"{shown}\n{logs(run_dir)}"
    return shown


def ranks(cluster: Cluster) -> list[Process]:
    """What trains in all jobs, by node."""
    return [process for process in cluster.processes_left() if process_name(process.pid) == "trainer"]


def kill(found: list[Process]) -> None:
    for process in found:
        with contextlib.suppress(ProcessLookupError):  # its parent is dead
            os.kill(process.pid, signal.SIGKILL)


def steps_lost(run_dir: Path) -> list[int]:
    """For each start but the first, how many finished steps of the attempt before it does again."""
    starts = [start["step"] for start in records(run_dir, "start")]
    whole, _, _ = (run_dir / "metrics.jsonl").read_text().rpartition("\n")
    lost, done = [], 0
    for line in map(json.loads, whole.splitlines()):
        if line["kind"] == "start" and done:
            lost.append(done - line["step"])
        if line["kind"] == "train":
            done = line["step"]
    assert len(lost) == len(starts) - 1
    return lost

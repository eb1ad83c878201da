#!/usr/bin/env python3
"""How long a job takes from the death of a rank to its next finished step, beside how long it takes to start.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --shard
    python benchmarks/recovery.py --ranks 4 --options "--dataset fake --model resnet18 --num-workers 2"

Each job is started under a plain `torchrun`, measured to its first finished step (a cold start), then its last rank is
killed with SIGKILL and the time to the next finished step is measured (a recovery): in turn one whose keepers start
the ranks again in place, and one with `--keeper off --max-restarts 1`. Prints the medians, their ratios, and where the
time goes. The task stamps the time in the methods that `train.py` calls; the rest is read from logs, metrics.jsonl and
/proc.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from torch import nn
from torch.optim import Optimizer

from evenkeel.cli.chaos.job import rank_of
from evenkeel.common.processes import descendants, process_name
from evenkeel.config import Config
from evenkeel.data.dataset import SizedDataset
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.datasets import ABOUT

IMPORTED = time.time()
ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120.0
"""Seconds for any one phase of a job."""


@dataclass(frozen=True)
class Options:
    """Measure recoveries and cold starts."""

    jobs: int = 5
    """Jobs of each kind that are started, and recover once."""
    ranks: int = 2
    """Processes of each."""
    shard: bool = False
    """With `--shard on`, which needs keepers, and a network of repeated blocks."""
    options: str = ""
    """More options of the job."""
    folder: Path = Path()
    """Where to write. It is left as it was."""


@dataclass
class Stamped(Classify):
    """The digits, and the times at which rank 0 came to them."""

    stamps: str = ""
    """File to add a line to for each attempt."""

    def train_dataset(self) -> SizedDataset:
        """The data, and the first stamp."""
        started = process_start()  # a fork imports nothing
        self.times = {"processes started": started, "imports": max(IMPORTED, started), "command line": time.time()}
        return super().train_dataset()

    def model(self) -> nn.Module:
        """The network, after the data."""
        self.times["data"] = time.time()
        return super().model()

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        """The optimizer, and the line."""
        made = super().optimizers(model, config)
        self.times["model, optimizer"] = time.time()
        if os.environ["RANK"] == "0":
            with Path(self.stamps).open("a") as file:
                file.write(json.dumps(self.times) + "\n")
        return made


@dataclass
class Blocks(Stamped):
    """The same with a network that `--shard on` can divide."""

    def model(self) -> nn.Module:
        """Layers of one class."""
        super().model()
        inputs = self.size**2 * ABOUT[self.dataset].channels
        hidden = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 256), *hidden, nn.Linear(256, self.classes))


def process_start() -> float:
    """When this process was started, in seconds since 1970, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none where it does not exist yet. The last may be still incomplete."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def first_step(run_dir: Path, attempt: int, job: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Wait for an attempt's first step: when the attempt had its state, and when the step was done."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and job.poll() is None:
        records = lines(run_dir / "metrics.jsonl")
        starts = [i for i, record in enumerate(records) if record["kind"] == "start"]
        if len(starts) >= attempt:
            since = records[starts[attempt - 1] :]
            done = [record["time"] for record in since if record["kind"] == "train"]
            if done:
                return since[0]["time"], done[0]
        time.sleep(0.02)
    raise SystemExit(f"no first step of attempt {attempt} in {run_dir}; the job's exit code: {job.poll()}")


def phases(run_dir: Path, attempt: int, begun: float, started: float, done: float) -> dict[str, float]:
    """Seconds from the start of an attempt's processes to its first step, and before that since ``begun``."""
    stamps = lines(run_dir.with_suffix(".stamps"))[attempt - 1]
    connected = (run_dir / "logs" / f"attempt-{attempt:04d}" / "rank-0.log").stat()
    marks = stamps | {
        # Python does not tell when a file was made, but until somebody reads the log its atime does
        "rendezvous, process group": min(connected.st_atime, connected.st_mtime),
        "resume": started,
        "first step": done,
    }
    seconds, before = {}, begun
    for name, mark in marks.items():
        seconds[name] = mark - before
        before = mark
    return seconds


def workers(agent: int) -> list[int]:
    """What trains below a torchrun agent, by rank: its own children, or what these keepers have forked."""
    below = {pid: status.parent for pid, status in descendants(agent).items() if rank_of(pid) is not None}
    trainers = {below[pid]: pid for pid in below if process_name(pid) == "trainer"}
    started = sorted((pid for pid, parent in below.items() if parent == agent), key=lambda pid: rank_of(pid) or 0)
    return [trainers.get(pid, pid) for pid in started]


def logged(log: Path, *texts: str) -> float:
    """When the first line with one of these was logged."""
    line = next(line for line in log.read_text().splitlines() if any(text in line for text in texts))
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def job(options: Options, run_dir: Path, keeper: str) -> tuple[dict[str, float], dict[str, float]]:
    """Start a job, kill a rank, and end the job: seconds of the phases of a cold start and of a recovery."""
    arguments = [
        "--task",
        f"{Path(__file__)}:{'Blocks' if options.shard else 'Stamped'}",
        "--stamps",
        run_dir.with_suffix(".stamps"),
        "--run-dir",
        run_dir,
    ]
    arguments += ["--epochs", 100_000, "--checkpoint-every", 0, "--eval-every", 10**6, "--log-every", 1]
    arguments += ["--keeper", keeper, "--wandb", "disabled", *shlex.split(options.options)]
    arguments += ["--shard", "on", "--reduce", "tree"] * options.shard
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}", "--max-restarts=1"]
    command = [sys.executable, *torchrun, str(ROOT / "train.py"), *map(str, arguments)]
    begun = time.time()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            cold = phases(run_dir, 1, begun, *first_step(run_dir, 1, process))
            time.sleep(1)
            os.kill(workers(process.pid)[-1], signal.SIGKILL)
            killed = time.time()
            steps = first_step(run_dir, 2, process)
        finally:
            process.terminate()
    survivor = run_dir / "logs" / "attempt-0001" / "rank-0.log"
    # a signal may be faster than the collective's error, and then nothing is said before the saving
    rescued = ("stored", "saved")  # in memory, or on the disk
    noticed, saved = logged(survivor, "failed at step", *rescued), logged(survivor, *rescued)
    after = phases(run_dir, 2, saved, *steps)
    return cold, {"survivor notices": noticed - killed, "rescue": saved - noticed} | after


def show(title: str, measured: list[dict[str, float]]) -> float:
    """Print medians of phases and of the whole, and return the latter."""
    whole = median(sum(phases.values()) for phases in measured)
    print(f"{title}: {whole:.2f} s, median of {len(measured)}")
    for name in measured[0]:
        of_phase = [phases[name] for phases in measured]
        print(f"  {name:<28}{median(of_phase):>6.2f} s   {min(of_phase):.2f} .. {max(of_phase):.2f}")
    return whole


def main(options: Options) -> None:
    """Measure and print."""
    ways = {"on": "by keepers", "off": "by torchrun, --keeper off"}
    if options.shard:
        del ways["off"]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        names = [(f"job-{i}-{keeper}", keeper) for i in range(options.jobs) for keeper in ways]
        measured = [(keeper, *job(options, Path(folder).resolve() / name, keeper)) for name, keeper in names]
    cold_starts = [cold for keeper, cold, _ in measured if keeper == "on"]
    cold = show("cold start, from the command to the first step", cold_starts)
    for keeper, who in ways.items():
        title = f"recovery {who}, from SIGKILL to the next step"
        recovery = show(title, [recovery for kind, _, recovery in measured if kind == keeper])
        print(f"recovery {who} / cold start = {recovery / cold:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Options))

#!/usr/bin/env python3
"""A step of two ranks, of which one is three times as slow: with --shares auto, and with equal shares.

    python benchmarks/shares.py

Starts a job with equal shares and one with --shares auto in turn. The second rank's process is stopped for two thirds
of the time (SIGSTOP and SIGCONT). Prints the ratio of the steps' median times in the second half of the jobs, the
shares, and whether the weights are the same (--reduce tree).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from evenkeel.cli.chaos.job import rank_of
from evenkeel.common.processes import descendants

ROOT = Path(__file__).resolve().parent.parent
SPAN = 0.03
"""Seconds in which the slow rank runs once and is stopped once. Shorter than a step."""


@dataclass(frozen=True)
class Options:
    """Measure unequal shares."""

    rounds: int = 3
    """Jobs of each kind."""
    micro_batches: int = 4
    """Of a step."""
    steps: int = 400
    """Of a job."""
    runs: float = 1 / 3
    """Share of the time for which the slow rank may run."""


def job(options: Options, run_dir: Path, shares: str) -> dict[str, Any]:
    """Run a job to its end: seconds of a step, shares, and the sha256 of the weights."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py"]
    command += ["--run-dir", run_dir, "--reduce", "tree", "--micro-batches", options.micro_batches, "--log-every", 4]
    command += ["--batch-size", 512, "--epochs", 10**6, "--max-steps", options.steps, "--eval-every", 10**6]
    command += ["--shares", shares, "--keeper", "off", "--wandb", "disabled"]
    started = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, cwd=ROOT)
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        if started.poll() is not None:
            sys.exit(f"the job ended with {started.returncode} before its first step")
        time.sleep(0.05)
    slow = next(pid for pid in descendants(started.pid) if rank_of(pid) == 1)
    while started.poll() is None:
        try:
            os.kill(slow, signal.SIGSTOP)
            time.sleep(SPAN * (1 - options.runs))
            os.kill(slow, signal.SIGCONT)
            time.sleep(SPAN * options.runs)
        except ProcessLookupError:
            break
    if started.wait():
        sys.exit(f"the job ended with {started.returncode}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = [record["time"] for record in records if record["kind"] == "train"]
    changed = [record["shares"] for record in records if record["kind"] == "shares"]
    summary = json.loads((run_dir / "summary.json").read_text())
    seconds = median((after - before) / 4 for before, after in pairwise(times[len(times) // 2 :]))
    return {"seconds": seconds, "shares": changed, "sha256": summary["weights_sha256"]}


def main(options: Options) -> None:
    """Measure and print."""
    ratios, hashes = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            found = {shares: job(options, Path(folder) / f"{shares}-{number}", shares) for shares in ("equal", "auto")}
            ratios.append(found["auto"]["seconds"] / found["equal"]["seconds"])
            hashes |= {each["sha256"] for each in found.values()}
            text = " ".join(f"{name} {1000 * each['seconds']:.0f} ms" for name, each in found.items())
            print(f"{text}, ratio {ratios[-1]:.2f}, shares {found['auto']['shares']}", flush=True)
    same = "the same" if len(hashes) == 1 else "NOT the same"
    print(f"auto / equal: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), weights {same}")


if __name__ == "__main__":
    main(tyro.cli(Options))

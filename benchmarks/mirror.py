#!/usr/bin/env python3
"""How long the training waits for a checkpoint while --mirror copies the one before, and while nothing copies.

    python benchmarks/mirror.py

The process of --mirror runs beside a job of one process that saves again and again. It is stopped (SIGSTOP) in every
second turn, so that both sides have the same job. Prints the medians of both waits, their difference as a share of one
copy of the state in memory, and the noise: the same share for every second turn without it against the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from checkpoint import MODELS, ours, seconds, size, started, trained
from turns import in_turn

from evenkeel.config import Config
from evenkeel.distributed.exits import exit_code
from evenkeel.mirror import copying
from evenkeel.run.earlier_run import MIRRORED


@dataclass(frozen=True)
class Options:
    """Compare the waits with and without --mirror."""

    model: str = "resnet18"
    """One of benchmarks/checkpoint.py."""
    turns: int = 15
    """Saves of each side that are measured."""
    url: str = ""
    """The store; default: a folder (file://)."""


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    model, batch = MODELS[options.model][0](), MODELS[options.model][1]()
    state = trained(model)
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), options.url or f"file://{name}/store"
        config = Config(run_dir=folder / "run", epochs=10**6, checkpoint_every=1, keep=1, mirror=url, wandb="disabled")
        config = config.resolved()
        os.environ[MIRRORED] = str(config.run_dir)
        settings = {"url": url, "run_dir": str(config.run_dir), "first": True, "job": "benchmark", "harmless": []}
        settings |= {"keep": 1, "keep_best": 0, "grace": 10.0, "again": False}
        command = [sys.executable, "-m", copying.__name__, json.dumps(settings)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as copier:
            assert copier.stdout
            assert copier.stdout.readline(), "it could not start"
            run = started(config, state)
            waits: dict[str, list[float]] = {"with": [], "without": []}

            def saves(side: str) -> Iterator[None]:
                while True:
                    copier.send_signal(signal.SIGCONT if side == "with" else signal.SIGSTOP)
                    time.sleep(2 * copying.POLL)  # it has found the last checkpoint, and is at work
                    wait, _ = ours(run, state, lambda: model(batch).square().mean().backward())
                    waits[side].append(wait)
                    yield

            in_turn({side: saves(side) for side in waits}, options.turns, torch.device("cpu"))
            copier.send_signal(signal.SIGKILL)
        one_piece = torch.ones(size(state.capture()) // 4)
        target = one_piece.clone()
        copy = median(seconds(lambda: target.copy_(one_piece)) for _ in range(9))
        sent = len(list(folder.glob("store/checkpoints/*/manifest.json")))
    found = {side: median(taken[-options.turns :]) for side, taken in waits.items()}
    print(f"{options.model}: {one_piece.nbytes / 1e6:.0f} MB, one copy {1e3 * copy:.1f} ms; {sent} checkpoints there")
    for side, wait in found.items():
        print(f"  waits {side:<8}{1e3 * wait:8.1f} ms")
    print(f"  (with - without) / one copy = {(found['with'] - found['without']) / copy:.2f}")
    even, odd = (median(waits["without"][first::2]) for first in (0, 1))
    print(f"  noise: {abs(even - odd) / copy:.2f}")


if __name__ == "__main__":
    raise SystemExit(exit_code(lambda: main(tyro.cli(Options))))

#!/usr/bin/env python3
"""Evenkeel's `train.py` as shipped, beside a bare DDP loop, Accelerate, Lightning Fabric and the Lightning Trainer.

    python benchmarks/peers.py --rounds 5
    pip install -e '.[bench]'      # the peers

All sides train the same network on the same data with the same batch, optimizer and number of steps, in float32, on so
many CPU processes of one thread each, joined by gloo. Each is written as its own documentation has it (sides/). The
others save their model at the end, or what they save by default. Ours runs with its defaults, so it also evaluates
after each epoch and keeps checkpoints; its data sets are torch's own.

In each round every side runs each workload once, as a torchrun of its own, in an order that rotates. Ratios are taken
within a round, so that a machine that becomes slower does so for all. The tables show their medians over the rounds,
with the least and the greatest in brackets. "bare again" is bare against itself: what it differs from 1 is noise.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal, get_args

import numpy as np
import tyro
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent
SIDES = ROOT / "benchmarks" / "sides"
TASK = SIDES / "evenkeel_task.py"
WARM_UP = 0.2
"""Share of the steps that is left out of the median: allocators, DDP's rebuilding of its buckets, caches."""

WorkloadName = Literal["digits", "resnet18", "mlp", "jpegs", "gpt"]
SideName = Literal[
    "bare", "bare again", "accelerate", "fabric", "lightning", "evenkeel", "evenkeel cut in 8", "evenkeel tree"
]


@dataclass(frozen=True)
class Workload:
    """How much of a workload is run. What it trains is in sides/workloads.py."""

    about: str
    batch_size: int
    steps: int


WORKLOADS: dict[WorkloadName, Workload] = {
    "digits": Workload("a small CNN on the digits: small steps", 128, 300),
    "resnet18": Workload("ResNet-18, 64 px: compute", 64, 20),
    "mlp": Workload("an MLP of 25 M parameters: communication", 128, 20),
    "jpegs": Workload("2,000 JPEGs of about 256 px, random crop and flip, 1 worker a rank: data", 64, 93),
    "gpt": Workload("a GPT of 3 M parameters on bytes, context 128", 16, 20),
}

PEERS: dict[SideName, str] = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning"}
"""Side -> the package that it needs."""

OURS: dict[SideName, Callable[[int], list[str]]] = {
    "evenkeel": lambda share: [],
    "evenkeel cut in 8": lambda share: ["--micro-batches=8"],  # what the default was once
    "evenkeel tree": lambda share: [f"--micro-batch={share}", "--reduce=tree"],
}
"""Side -> options of train.py, from a rank's share of the batch."""


@dataclass(frozen=True)
class Options:
    """Compare training loops."""

    rounds: int = 5
    """How often each side runs each workload."""
    workloads: tuple[WorkloadName, ...] = tuple(WORKLOADS)
    """Which."""
    sides: tuple[SideName, ...] = ("bare", "bare again", *PEERS, *OURS)
    """Which. Ratios need bare."""
    steps: int = 0
    """Steps of each run. 0: as many as suit the workload."""
    ranks: int = 2
    """Processes of each run."""
    json: Path | None = None
    """File for every run's numbers. Written anew after each."""


@dataclass(frozen=True)
class Run:
    """What one run of one side was like."""

    workload: WorkloadName
    side: SideName
    round: int
    step: float
    """Seconds, the median of rank 0."""
    cpu: float
    """Seconds of CPU time of a step in a rank, its loader processes not counted; steadier on a busy machine."""
    first: float
    """Seconds from the command to the end of the first step on all ranks."""
    wall: float
    """Seconds of the whole command."""
    peak: float
    """Bytes, the most of any rank."""


METRICS = {"step": ("ms", 1e3), "cpu": ("ms", 1e3), "first": ("s", 1.0), "wall": ("s", 1.0), "peak": ("MB", 1e-6)}
"""Field of a run -> its unit in the tables, and the factor."""


def make_images(folder: Path, samples: int = 2000) -> None:
    """JPEGs with the look of photographs, as far as a decoder minds: smooth fields, some texture, edges. 10 classes."""
    for i in range(samples + 64):
        random = np.random.default_rng(i)
        size = tuple(random.integers(232, 281, 2).tolist())
        image = Image.new("RGB", size)
        for cells, share in ((6, 1.0), (24, 0.3), (96, 0.15)):  # coarse to fine
            noise = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            image = Image.blend(image, noise.resize(size, Image.Resampling.BICUBIC), share)
        for _ in range(4):
            corners = [tuple(corner) for corner in random.integers(0, 280, (3, 2)).tolist()]
            ImageDraw.Draw(image).polygon(corners, fill=tuple(random.integers(0, 256, 3).tolist()))
        path = folder / ("train" if i < samples else "val") / f"class-{i % 10}" / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, quality=90)


def script(side: SideName, workload: WorkloadName, steps: int, ranks: int, folder: str, images: Path) -> list[str]:
    """What torchrun is to start for a side, with its arguments."""
    if side not in OURS:
        name = "bare" if side == "bare again" else f"{side}_" if side in PEERS else side
        return [f"{SIDES / name}.py"]
    batch_size = WORKLOADS[workload].batch_size
    task = "Jpegs" if workload == "jpegs" else "Plain"
    line = [f"{ROOT / 'train.py'}", f"--task={TASK}:{task}", f"--batch-size={batch_size}", f"--run-dir={folder}/run"]
    # disabled is what auto means without a key; nobody's account shall get these runs
    line += [f"--max-steps={steps}", "--epochs=1000000", "--wandb=disabled", *OURS[side](batch_size // ranks)]
    if workload == "jpegs":
        line += ["--dataset=imagefolder", f"--data-dir={images}", "--augment=basic", "--num-workers=1"]
    return line


def run(
    side: SideName, workload: WorkloadName, number: int, steps: int, ranks: int, images: Path, slow: float = 0.0
) -> Run:
    """One side's command from its start to its end.

    Raises:
        SystemExit: it failed; shows what it said.
    """
    steps = steps or WORKLOADS[workload].steps
    with tempfile.TemporaryDirectory() as folder:
        job: dict[str, object] = {"workload": workload, "batch_size": WORKLOADS[workload].batch_size, "steps": steps}
        job |= {"slow": slow, "folder": folder, "images": str(images)}
        # without compiled files each start would compile the sources anew, and those of a checkout are ours
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = kept | {"OMP_NUM_THREADS": "1", "PEERS_JOB": json.dumps(job)}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [*torchrun, *script(side, workload, steps, ranks, folder, images)]
        log = Path(folder, "log")
        begun = time.monotonic()
        with log.open("wb") as file:
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        wall = time.monotonic() - begun
        left = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
        if done.returncode or len(left) != ranks or any(len(rank["ended"]) != steps for rank in left):
            raise SystemExit(f"{log.read_text()}\n{side}, {workload}: failed with exit code {done.returncode}")
    warm = [pairwise(clock[int(steps * WARM_UP) :]) for clock in zip(*left[0]["ended"], strict=True)]
    step, cpu = (median(after - before for before, after in pairs) for pairs in warm)
    return Run(
        workload,
        side,
        number,
        step,
        cpu,
        first=max(rank["ended"][0][0] for rank in left) - begun,
        wall=wall,
        peak=max(rank["peak"] for rank in left),
    )


def installed(sides: Sequence[SideName]) -> list[SideName]:
    """The sides that can run; says which cannot."""
    missing = [side for side in sides if side in PEERS and not importlib.util.find_spec(PEERS[side])]
    for side in missing:
        print(f"{side}: not installed and left out: pip install -e '.[bench]'", flush=True)
    return [side for side in sides if side not in missing]


def ratios(runs: Sequence[Run], side: SideName, against: Sequence[SideName], metric: str) -> list[float]:
    """A side's metric to the least of the others', for each round that is complete.

    Args:
        runs: of one workload.
        side: whose.
        against: of them the best is taken in each round.
        metric: field of a run.
    """
    found = []
    for number in sorted({run.round for run in runs}):
        values = {run.side: getattr(run, metric) for run in runs if run.round == number}
        if side in values and any(other in values for other in against):
            found.append(values[side] / min(values[other] for other in against if other in values))
    return found


def spread(found: Sequence[float]) -> str:
    """A median, with the least and the greatest."""
    return f"{median(found):.2f} [{min(found):.2f} .. {max(found):.2f}]" if found else ""


def tables(runs: Sequence[Run]) -> str:
    """Markdown: a table for each workload, and one of us against the best of the others."""
    names = list(dict.fromkeys(run.workload for run in runs))
    sides = list(dict.fromkeys(side for side in get_args(SideName) if any(run.side == side for run in runs)))
    others: list[SideName] = [side for side in ("bare", *PEERS) if side in sides]
    lines = []
    for name in names:
        mine = [run for run in runs if run.workload == name]
        lines += ["", f"**{name}**: {WORKLOADS[name].about}; G = {WORKLOADS[name].batch_size}; ratios to bare", ""]
        lines.append(_row("", *(heading for metric in METRICS for heading in (metric, "ratio"))))
        lines.append(_row(*["---"] * (1 + 2 * len(METRICS))))
        for side in sides:
            cells = []
            for metric, (unit, factor) in METRICS.items():
                value = median(getattr(run, metric) for run in mine if run.side == side) * factor
                cells += [f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"]
                cells += [spread(ratios(mine, side, ["bare"], metric))]
            lines.append(_row(side, *cells))
    ours = [side for side in OURS if side in sides]
    if ours:
        lines += ["", f"Evenkeel / the best of {', '.join(others)} in the same round", ""]
        lines += [_row("", "", *METRICS), _row(*["---"] * (2 + len(METRICS)))]
    for name in names:
        mine = [run for run in runs if run.workload == name]
        for side in ours:
            lines.append(_row(name, side, *(spread(ratios(mine, side, others, metric)) for metric in METRICS)))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(options: Options) -> None:
    """Measure and print."""
    sides, runs = installed(options.sides), []
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder)
        if "jpegs" in options.workloads:
            make_images(images)
        for number in range(options.rounds):
            turn = number % len(sides)
            for workload in options.workloads:
                for side in [*sides[turn:], *sides[:turn]]:
                    found = run(side, workload, number, options.steps, options.ranks, images)
                    runs.append(found)
                    told = (
                        f"{metric} {getattr(found, metric) * f:.4g} {unit}" for metric, (unit, f) in METRICS.items()
                    )
                    print(f"round {number + 1}, {workload}, {side}: {', '.join(told)}", file=sys.stderr, flush=True)
                    if options.json:
                        options.json.write_text(json.dumps([asdict(each) for each in runs], indent=1))
    print(tables(runs))


if __name__ == "__main__":
    main(tyro.cli(Options))

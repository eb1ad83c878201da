#!/usr/bin/env python3
"""Draw what `kill -9` costs a job: Evenkeel's train.py and a stock DDP loop that saves after each epoch.

    python benchmarks/kill.py --output docs/kill.svg

Both train the same network on the same digits under the same plain torchrun, one after the other, and lose a rank at
the same two steps: in the middle of the second and of the third of three epochs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro
from recovery import lines, workers
from torch import Tensor, nn

from evenkeel.tasks.classify import Classify

ROOT = Path(__file__).resolve().parent.parent
EPOCHS, STEPS_PER_EPOCH, BATCH, PAUSE = 3, 23, 64, 0.35
STEPS, KILLS = EPOCHS * STEPS_PER_EPOCH, [int(1.5 * STEPS_PER_EPOCH), int(2.5 * STEPS_PER_EPOCH)]


@dataclass
class Paced(Classify):
    """The digits, at a pace at which restarts show and do not dominate."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The usual one, after a pause."""
        time.sleep(PAUSE)
        return super().loss(model, batch)


@dataclass
class Course:
    """(seconds since the command, last finished step) of a job: after each step and each start, and at each kill."""

    points: list[tuple[float, int]]
    kills: list[tuple[float, int]]

    @property
    def again(self) -> int:
        """Steps that were lost and done again."""
        return sum(max(0, before[1] - after[1]) for before, after in pairwise(self.points))


def follow(*script: object, run_dir: Path, **env: str) -> Course:
    """Run a job to its end, and kill its last rank when it has come to each of the steps in KILLS."""
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts=3".split()
    log, kills, begun = run_dir.with_suffix(".log"), list[tuple[float, int]](), time.time()
    command += map(str, script)
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env) as job:
        try:
            while job.poll() is None and time.time() < begun + 300:
                done = [line["step"] for line in lines(run_dir / "metrics.jsonl") if line["kind"] == "train"]
                if done and len(kills) < len(KILLS) and done[-1] >= KILLS[len(kills)]:
                    os.kill(workers(job.pid)[-1], signal.SIGKILL)
                    kills.append((time.time() - begun, done[-1]))
                time.sleep(0.02)
        finally:
            job.terminate()
    if job.returncode or len(kills) < len(KILLS):
        raise SystemExit(f"{script}\nkills {kills}, exit code {job.returncode}\n{log.read_text()[-3000:]}")
    told = [line for line in lines(run_dir / "metrics.jsonl") if line["kind"] in ("start", "train")]
    return Course([(0.0, 0), *((line["time"] - begun, line["step"]) for line in told)], kills)


STYLE = """
text { font-family: system-ui, sans-serif; font-size: 14px; fill: #59636e } .page { fill: #fff }
.grid { stroke: #d1d9e0 } .line { fill: none; stroke: currentColor; stroke-width: 2.5; stroke-linejoin: round }
.ours { color: #2a78d6 } .stock { color: #d9480f } .label { font-weight: 600 } .label, .lost { fill: currentColor }
@media (prefers-color-scheme: dark) { .page { fill: #0d1117 } text { fill: #9198a1 } .grid { stroke: #3d444d }
.ours { color: #4c9aff } .stock { color: #ff7a45 } .label { fill: currentColor } }
"""
LEFT, RIGHT, TOP, BOTTOM = 34, 466, 36, 262  # of the axes; the picture is 480 wide, like a phone, and 336 high


def draw(ours: Course, stock: Course) -> str:
    """The picture as SVG: finished steps over seconds."""
    seconds = 1.02 * max(course.points[-1][0] for course in (ours, stock))

    def place(second: float, step: float) -> tuple[float, float]:
        return LEFT + second / seconds * (RIGHT - LEFT), BOTTOM - step / STEPS * (BOTTOM - TOP)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    def pairs(points: list[tuple[float, int]]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)

    parts = ['<rect class="page" width="480" height="336" rx="6"/>']
    for step in range(0, STEPS + 1, STEPS_PER_EPOCH):
        _, y = place(0, step)
        parts += [f'<path class="grid" d="M{LEFT},{y:.0f}H{RIGHT}"/>']
        parts += [text(LEFT - 6, y + 5, str(step), 'text-anchor="end"')]
    for tick in range(0, int(seconds) + 1, 10):
        parts += [text(place(tick, 0)[0], BOTTOM + 18, f"{tick} s", 'text-anchor="middle"')]
    for name, course in (("stock", stock), ("ours", ours)):
        corners = course.points[:1]
        for second, step in course.points[1:]:
            peak = corners[-1][1]
            if step < peak:  # down, and up again to where it was
                corners.append((second, peak))
                again = [point for point in course.points if point[0] >= second][: peak - step + 1]
                parts += [f'<polygon class="stock lost" opacity=".25" points="{pairs([(second, peak), *again])}"/>']
            corners.append((second, step))
        parts += [f'<polyline class="line {name}" id="{name}" points="{pairs(corners)}"/>']
        for x, y in (place(*kill) for kill in course.kills):
            parts += [f'<path class="line {name}" d="M{x - 5:.1f},{y - 5:.1f}l10,10m0,-10l-10,10"/>']
    sides = [(ours.points, "ours", "Evenkeel"), (stock.points, "stock", "stock DDP loop")]
    sides.sort(key=lambda side: side[0][-1])  # left of the line that ends first, and below the other
    end = place(*sides[0][0][-4])[0] - 12
    for x, y, (_, name, words) in ((end, TOP + 18, sides[0]), (RIGHT, BOTTOM - 50, sides[1])):
        parts += [text(x, y, words, f'class="{name} label" text-anchor="end"')]
    sums = [f"{course.points[-1][0]:.0f} s, {course.again} steps done again" for course in (ours, stock)]
    said = ["Finished steps of two ranks; \u00d7 is a kill -9 of one of them.", f"Evenkeel: {sums[0]}."]
    said += [f"Stock loop, saves each epoch: {sums[1]} (shaded)."]
    parts += [text(8, y, words) for y, words in zip((20, 306, 326), said, strict=True)]
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 336" role="img">'
    return "\n".join([head, f"<title>{' '.join(said)}</title><style>{STYLE}</style>", *parts, "</svg>", ""])


def main(output: Path = Path("docs/kill.svg")) -> None:
    """Run both jobs, and draw them into an SVG file."""
    job = ["--task", f"{ROOT}/benchmarks/kill.py:Paced", "--epochs", EPOCHS, "--batch-size", BATCH]
    job += ["--eval-every", STEPS, "--log-every", 1, "--wandb", "disabled"]
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else stock ranks may meet addresses of dead ones and fail
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "stock"), Path(folder, "ours")
        loop = [ROOT / "tests/support/stock_loop.py", "--run-dir", theirs, EPOCHS, BATCH, PAUSE]
        stock = follow(*loop, run_dir=theirs, **own_store)
        evenkeel = follow(ROOT / "train.py", *job, "--run-dir", ours, run_dir=ours)
    output.write_text(draw(evenkeel, stock))
    for name, course in (("Evenkeel", evenkeel), ("stock loop", stock)):
        print(f"{name}: {course.points[-1][0]:.1f} s, {course.again} steps done again, kills at {course.kills}")


if __name__ == "__main__":
    tyro.cli(main)

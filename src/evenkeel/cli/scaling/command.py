"""The options of `python -m evenkeel scaling`; starts the runs, one after the other, and prints what they show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ...common.errors import Ended, Refusal
from ...common.keyboard import CtrlC
from ...common.network import Link
from ...common.processes import count_cores, die_with_parent
from ...config import Flag, MaybePath, devices_per_rank, option
from .analysis import LOSSES, Row, Sample, measure, middle, predicted, table

if TYPE_CHECKING:
    from rich.table import Table

TRACED = 5
"""Steps after the timed ones, which are traced to see the communication. The speed is that of steps without a trace."""

OWN = ("run-dir", "max-steps", "epochs", "profile", "eval-every", "checkpoint-every", "log-every", "wandb", "fresh")
"""Options that the short runs need for themselves."""

STRONG, WEAK = "fixed global batch", "fixed batch a rank"


@dataclass(frozen=True)
class ScalingCommand:
    """Measure how a job gets faster with more ranks on this machine, by short real runs in turn.

    Example: python -m evenkeel scaling -g 1,2 --output scaling.svg -- --batch-size 256

    What follows after `--` are options of train.py. The runs are in temporary folders. Each number of ranks runs once
    with the global batch of --batch-size, and once with a batch that grows with the ranks.
    """

    gpus: Annotated[str, tyro.conf.arg(aliases=["-g"], metavar="N,N,...")]
    """Numbers of ranks: GPUs, or processes on a machine without, e.g. 1,2,4. The smallest is compared with."""
    nodes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = option(1, 1, 2**16)
    """Nodes. Only 1 can be measured."""
    steps: int = option(60, 24, 10**6)
    """Steps of each run. The first third is for warming up and does not count."""
    rounds: int = option(3, 1, 1000)
    """How often all are run, in turn, so that a change of the machine's speed hits all alike. Medians count."""
    output: MaybePath = None
    """Write a plot to this file: .svg or .png. Needs matplotlib."""
    json: Flag = False
    """Print JSON instead of tables."""
    script: Path = Path("train.py")
    """The training script."""

    def __call__(self, train_options: list[str]) -> int:
        """Run everything and print the tables."""
        ranks = self._checked(train_options)
        from ...launch.launchers import processes_of_node  # these two import torch
        from ...tasks.command_line import parse

        config, _ = parse(train_options)
        processes_of_node(config, ranks[-1] * devices_per_rank(config))
        batches = {STRONG: dict.fromkeys(ranks, config.batch_size)}
        batches[WEAK] = {n: config.batch_size * n // ranks[0] for n in ranks}
        import torch

        if not torch.cuda.is_available():
            cores = count_cores()
            train_options = [*train_options, f"--threads={config.threads or max(1, cores // ranks[-1])}"]
            if ranks[-1] > cores:
                _say(f"WARNING: {ranks[-1]} ranks share {cores} cores; what that costs looks like bad scaling")
        found = self._run_all(batches, train_options)
        tables = {
            title: table({n: (batch, found[n, batch]) for n, batch in sizes.items()}, title == WEAK)
            for title, sizes in batches.items()
        }
        self._show(tables)
        if self.output:
            self._draw(tables, self.output)
        return 0

    def _checked(self, train_options: list[str]) -> list[int]:
        """The numbers of ranks, in order; what cannot be measured is refused."""
        ranks = sorted({int(word) if re.fullmatch("[0-9]{1,4}", word) else 0 for word in self.gpus.split(",")})
        if len(ranks) < 2 or ranks[0] < 1 or ranks[-1] > 1024:
            raise Refusal(f"-g {self.gpus[:40]}: give two or more numbers of ranks from 1 to 1024, for example 1,2,4")
        if odd := [n for n in ranks if n % ranks[0]]:
            raise Refusal(f"-g {self.gpus}: {odd[0]} is not a multiple of {ranks[0]}; a batch could not grow with it")
        if self.nodes > 1:
            raise Refusal(f"-n {self.nodes}: only one node can be measured; leave -n out, and run this on a node")
        if not self.script.is_file():
            raise Refusal(f"--script {self.script}: no such file; run this in the folder of train.py, or name it")
        for name in OWN:
            if any(word.partition("=")[0].replace("_", "-") == f"--{name}" for word in train_options):
                raise Refusal(f"-- --{name}: scaling sets it for its short runs; leave it out")
        if self.output and self.output.suffix not in (".svg", ".png"):
            raise Refusal(f"--output {self.output}: name a file that ends in .svg or .png")
        if self.output and self.output.exists():
            raise Refusal(f"--output {self.output}: exists already; name another file")
        if self.output and not self.output.parent.is_dir():
            raise Refusal(f"--output {self.output}: there is no folder {self.output.parent}; make it first")
        return ranks

    def _run_all(self, batches: dict[str, dict[int, int]], options: list[str]) -> dict[tuple[int, int], Sample]:
        """The median run of each (ranks, global batch)."""
        todo = sorted({pair for sizes in batches.values() for pair in sizes.items()})
        found: dict[tuple[int, int], list[Sample]] = {pair: [] for pair in todo}
        for number in range(self.rounds):
            for ranks, batch in todo:
                sample = self._run(ranks, batch, options)
                found[ranks, batch].append(sample)
                done = f"round {number + 1} of {self.rounds}: {_ranks(ranks)}, batch {batch}"
                _say(f"{done}: {sample.speed:,.0f} samples/s")
        return {pair: middle(samples) for pair, samples in found.items()}

    def _run(self, ranks: int, batch: int, options: list[str]) -> Sample:
        from ...launch.topology import Topology, torchrun

        with tempfile.TemporaryDirectory(prefix="evenkeel-scaling-") as folder:
            run_dir, output = Path(folder) / "run", Path(folder) / "output"
            own = {
                "batch-size": batch, "run-dir": run_dir, "max-steps": self.steps + TRACED, "epochs": 10**6,
                "profile": f"{self.steps}:{self.steps + TRACED}", "eval-every": 10**9, "checkpoint-every": 0,
                "log-every": max(1, self.steps // 12), "wandb": "disabled",
            }  # fmt: skip
            words = [*options, *(f"--{name}={value}" for name, value in own.items())]
            command = torchrun(Topology(ranks, max_restarts=0), Link("127.0.0.1"), self.script, words)
            with output.open("wb") as file, CtrlC() as interrupt:  # the run gets it too, and ends before its folder
                code = subprocess.run(
                    command.argv,
                    env={**os.environ, **command.env},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    preexec_fn=partial(die_with_parent, signal.SIGTERM),
                    check=False,
                ).returncode
            if interrupt.pressed:
                raise Ended("interrupted")
            if code:
                said = output.read_text(errors="replace").strip().splitlines()
                line = next((it for it in said if it.startswith("evenkeel: ")), "\n".join(said[-20:]))
                raise Ended(f"the run on {_ranks(ranks)} ended with code {code}: {line.removeprefix('evenkeel: ')}")
            return measure(run_dir, self.steps // 3, self.steps)

    def _show(self, tables: dict[str, list[Row]]) -> None:
        forecasts = {title: predicted(rows, title == WEAK) for title, rows in tables.items()}
        if self.json:
            found = {
                title: {"rows": [asdict(row) for row in rows], "prediction": forecasts[title]._asdict()}
                for title, rows in tables.items()
            }
            print(json.dumps(found, indent=2))
            return
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for title, rows in tables.items():
            console.print(_as_table(title, rows))
            it, few = forecasts[title], ", from one point" * (len(rows) == 2)
            console.print(
                f"prediction, not measured: {it.ranks} ranks would be {it.speedup:.2f} x as fast as {rows[0].ranks} "
                f"({it.law}'s law, serial share {it.serial_share:.0%}{few})\n"
            )

    def _draw(self, tables: dict[str, list[Row]], path: Path) -> None:
        from .plot import draw

        try:
            draw(tables, path)
        except ImportError:
            _say("no plot: matplotlib is missing; pip install 'evenkeel[report]'")
            return
        except OSError as error:
            raise Ended(f"--output {path}: {error.strerror}") from None
        _say(f"plot -> {path}")


def _as_table(title: str, rows: list[Row]) -> Table:
    from rich.table import Table

    names = ("ranks", "batch", "samples/s", "speed-up", "efficiency", *LOSSES)
    shown = Table(*names, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))  # 80 columns suffice
    for column in shown.columns:
        column.justify = "right"
    for row in rows:
        facts = (str(row.ranks), str(row.batch), f"{row.speed:,.0f}", f"{row.speedup:.2f}", f"{row.efficiency:.0%}")
        shown.add_row(*facts, *(f"{row.lost[name]:.0%}" for name in LOSSES))
    return shown


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _say(text: str) -> None:
    print(f"evenkeel: {text}", file=sys.stderr, flush=True)

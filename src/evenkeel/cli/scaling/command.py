"""The options of `python -m evenkeel scaling`; starts the runs one after the other, and prints the results."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ...common.arguments import is_typed
from ...common.display import say, styled
from ...common.errors import Ended, Refusal
from ...common.keyboard import CtrlC
from ...common.naming import count_ranks
from ...common.network import meet
from ...common.processes import count_cores, die_with_parent
from ...config import Flag, MaybePath, devices_per_rank, option
from ...launch.launchers import Count, link_of, processes_of_node
from ...launch.topology import DEFAULT_PORT, Topology, parse_master, torchrun
from .analysis import LOSSES, Row, Sample, measure, middle, predicted, table

if TYPE_CHECKING:
    from rich.table import Table

TRACED = 5
"""Traced steps after the timed ones, to measure communication. The speed is that of the steps without a trace."""

PATIENCE = 3600.0
"""Seconds that another node waits for node 0, which may be busy with smaller runs."""

STRONG, WEAK = "fixed global batch", "fixed batch a rank"  # keys of --json


@dataclass(frozen=True)
class ScalingCommand:
    """Measure how much faster a job gets with more ranks.

    Example: python -m evenkeel scaling -g 1,2 --output scaling.svg -- --batch-size 256

    On two nodes add -n 1,2 -nr 0 --master node0, on the other node with -nr 1. Options of train.py follow `--`. Each
    number of ranks runs once with the global batch of --batch-size, and once with a batch that grows with the ranks.
    """

    gpus: Annotated[str, tyro.conf.arg(aliases=["-g"], metavar="N,N,...")]
    """Processes per node to compare, e.g. 1,2,4: one per GPU, any number without GPUs. The smallest is the baseline."""
    nodes: Annotated[str, tyro.conf.arg(aliases=["-n"], metavar="N,N,...")] = "1"
    """Numbers of nodes to compare, e.g. 1,2, with a single -g. A node that a run does not need waits for the next."""
    node_rank: Annotated[int | None, tyro.conf.arg(aliases=["-nr"]), Count] = option(None, 0, 2**16)
    """Rank of this node, from 0. Node 0 is in every run and prints the tables."""
    master: Annotated[str, tyro.conf.arg(metavar="HOST[:PORT]", help_behavior_hint="")] = ""
    """Address by which the other nodes reach node 0. Each run has its own port, from this one (29500) upwards."""
    steps: int = option(60, 24, 10**6)
    """Steps of each run. The first third is warm-up and does not count."""
    rounds: int = option(3, 1, 1000)
    """Repetitions, interleaved, so that a change of the machine's speed affects all alike. Medians are reported."""
    output: MaybePath = None
    """Write a plot to this file: .svg or .png. Needs matplotlib."""
    json: Flag = False
    """Print JSON instead of tables."""
    script: Path = Path("train.py")
    """The training script."""

    def __call__(self, train_options: list[str]) -> int:
        """Run everything and print the tables."""
        nodes, most = self._checked(train_options)
        from ...tasks.command_line import parse  # imports torch

        config, _ = parse(train_options)
        processes_of_node(config, most.gpus * devices_per_rank(config))
        ranks = list(nodes)
        batches = {STRONG: dict.fromkeys(ranks, config.batch_size)}
        batches[WEAK] = {n: config.batch_size * n // ranks[0] for n in ranks}
        import torch

        if not torch.cuda.is_available():
            cores = count_cores()
            train_options = [*train_options, f"--threads={config.threads or max(1, cores // most.gpus)}"]
            if most.gpus > cores:
                _say(f"WARNING: {most.gpus} ranks share {cores} cores; this will look like bad scaling")
        found = self._run_all(batches, nodes, most, train_options)
        if self.node_rank:
            _say("the tables are on node 0")
            return 0
        tables = {
            title: table({n: (batch, found[n, batch]) for n, batch in sizes.items()}, title == WEAK)
            for title, sizes in batches.items()
        }
        self._show(tables)
        if self.output:
            from .plot import draw

            try:
                draw(tables, self.output)
            except OSError as error:
                raise Ended(f"--output {self.output}: {error.strerror}") from None
            _say(f"plot -> {self.output}")
        return 0

    def _checked(self, train_options: list[str]) -> tuple[dict[int, int], Topology]:
        """Nodes by the number of ranks, in order, and the largest topology; refuses what cannot be measured."""
        nodes, gpus = _numbers(self.nodes), _numbers(self.gpus)
        typed, varied = (f"-g {self.gpus[:40]}", gpus) if len(nodes) == 1 else (f"-n {self.nodes[:40]}", nodes)
        if len(varied) < 2 or len(nodes) * len(gpus) != len(varied):
            raise Refusal(f"{typed}: give two or more numbers, for example -g 1,2,4, or -n 1,2 -g 4")
        if odd := [n for n in varied if n % varied[0]]:
            raise Refusal(f"{typed}: {odd[0]} is not a multiple of {varied[0]}; the batch cannot grow with it")
        if nodes[-1] > 1 and self.node_rank is None:
            raise Refusal(f"-nr is missing: with -n {self.nodes} give each node its own, from 0")
        host, port = parse_master(self.master) if self.master else ("", DEFAULT_PORT)
        most = Topology(gpus[-1], nodes[-1], nodes[-1], self.node_rank or 0, host, port, max_restarts=0)
        if not self.script.is_file():
            raise Refusal(f"--script {self.script}: no such file; run this in the folder of train.py, or name it")
        for name in (*self._own(Path()), "fresh"):
            if is_typed(name, train_options):
                raise Refusal(f"-- --{name}: scaling sets it for its short runs; leave it out")
        if self.output and self.output.suffix not in (".svg", ".png"):
            raise Refusal(f"--output {self.output}: name a file that ends in .svg or .png")
        if self.output and self.output.exists():
            raise Refusal(f"--output {self.output}: exists already; name another file")
        if self.output and not self.output.parent.is_dir():
            raise Refusal(f"--output {self.output}: there is no folder {self.output.parent}; make it first")
        if self.output and not importlib.util.find_spec("matplotlib"):
            raise Refusal(f"--output {self.output}: matplotlib is not installed: pip install matplotlib")
        return {n * g: n for n in nodes for g in gpus}, most

    def _own(self, run_dir: Path) -> dict[str, object]:
        """Options that the short runs set themselves."""
        return {
            "run-dir": run_dir, "max-steps": self.steps + TRACED, "epochs": 10**6,
            "profile": f"{self.steps}:{self.steps + TRACED}", "eval-every": 10**9, "checkpoint-every": 0,
            "log-every": max(1, self.steps // 12), "wandb": "disabled",
        }  # fmt: skip

    def _run_all(
        self, batches: dict[str, dict[int, int]], nodes: dict[int, int], most: Topology, options: list[str]
    ) -> dict[tuple[int, int], Sample]:
        """The median run of each (ranks, global batch); on another node than 0 only its share of the runs."""
        todo = sorted({pair for sizes in batches.values() for pair in sizes.items()})
        found: dict[tuple[int, int], list[Sample]] = {pair: [] for pair in todo}
        for number, (ranks, batch) in enumerate(todo * self.rounds):
            if most.node_rank >= nodes[ranks]:
                continue
            topology = Topology(ranks, max_restarts=0)
            if nodes[ranks] > 1:  # at its own port: the store of the previous run may still exist
                n, port = nodes[ranks], most.master_port + number
                topology = replace(most, gpus=ranks // n, min_nodes=n, max_nodes=n, master_port=port)
            sample = self._run(topology, ranks, [*options, f"--batch-size={batch}"])
            done = f"round {number // len(todo) + 1} of {self.rounds}: {count_ranks(ranks)}, batch {batch}"
            _say(done + (f": {sample.speed:,.0f} samples/s" if sample else ""))
            found[ranks, batch] += [sample] if sample else []
        return {pair: middle(samples) for pair, samples in found.items() if samples}

    def _run(self, topology: Topology, ranks: int, options: list[str]) -> Sample | None:
        """Run this node's share of a run; node 0 has the result."""
        link, first = link_of(topology), topology.node_rank == 0
        if not first:  # torchrun orders nodes by address, and node 0 must get rank 0, which writes the files
            link = link._replace(address=f"~{topology.node_rank}")
        try:
            if topology.master_host:
                meet(topology.master_host, topology.master_port, is_master=first, patience=PATIENCE)
        except KeyboardInterrupt:
            raise Ended("interrupted") from None
        with tempfile.TemporaryDirectory(prefix="evenkeel-scaling-") as folder:
            run_dir, output = Path(folder) / "run", Path(folder) / "output"
            words = [*options, *(f"--{name}={value}" for name, value in self._own(run_dir).items())]
            command = torchrun(topology, link, self.script, words)
            none, ending = subprocess.DEVNULL, partial(die_with_parent, signal.SIGTERM, os.getpid())
            env = {**os.environ, **command.env}
            with (
                output.open("wb") as file,
                CtrlC() as interrupt,
            ):  # the run gets it too, and ends before its folder is deleted
                code = subprocess.call(command.argv, stdin=none, stdout=file, stderr=file, env=env, preexec_fn=ending)
            if interrupt.pressed:
                raise Ended("interrupted")
            if code:
                said = output.read_text(errors="replace").strip().splitlines()
                why = next((it for it in said if it.startswith("evenkeel: ")), "\n".join(said[-20:]))
                why = why.removeprefix("evenkeel: ")
                raise Ended(f"the run on {count_ranks(ranks)} ended with code {code}: {why}")
            return measure(run_dir, self.steps // 3, self.steps) if first else None

    def _show(self, tables: dict[str, list[Row]]) -> None:
        forecasts = {title: predicted(rows, title == WEAK) for title, rows in tables.items()}
        if self.json:
            found = {
                title: {"rows": [asdict(row) for row in rows], "prediction": forecasts[title]._asdict()}
                for title, rows in tables.items()
            }
            say(json.dumps(found, indent=2))
            return
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for title, rows in tables.items():
            console.print(_as_table(title, rows))
            it, few = forecasts[title], ", from one point" if len(rows) == 2 else ""
            text = (
                f"prediction, not measured: {it.ranks} ranks would be {it.speedup:.2f} x as fast as {rows[0].ranks} "
                f"({it.law}'s law, serial share {it.serial_share:.0%}{few})\n"
            )
            console.print(styled(text))


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


def _numbers(text: str) -> list[int]:
    """1,2,4 in order; empty if it is something else."""
    found = re.fullmatch("[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*", text)
    return sorted({int(word) for word in text.split(",")}) if found else []


def _say(text: str) -> None:
    say(f"evenkeel: {text}", to_stderr=True)

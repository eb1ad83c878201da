"""`python -m evenkeel status`: all runs below some folders, each in a line. Reads only, and needs no Slurm."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .config import Flag
from .errors import Refusal
from .keyboard import CtrlC
from .naming import TRAIN
from .slurm.commands import SlurmError
from .slurm.jobs import JobStatus, ask
from .standing import Metrics, Standing, find, job_id, standing

REDRAW = 2.0
"""Seconds between two looks at the runs with --watch."""

ASK = 10.0
"""Seconds between two questions to Slurm's controller, which serves everybody."""

COLOURS = {
    "queued": "yellow",
    "running": "green",
    "finished": "bold",
    "stopped": "yellow",
    "failed": "red",
    "lost": "red",
    "unknown": "magenta",
}

COLUMNS: dict[str, Callable[[Standing], str]] = {
    "RUN": lambda it: it.run,
    "STATE": lambda it: it.state,
    "JOB": lambda it: f"{it.job_id} {_job(it)}" if it.job_id else "",
    "STEP": lambda it: f"{it.step}/{it.total_steps or '?'}",
    "DONE": lambda it: f"{it.step / it.total_steps:.0%}" if it.total_steps else "",
    "ETA": lambda it: "" if it.eta is None else str(timedelta(seconds=round(it.eta))),
    "METRICS": lambda it: _metrics(it),
    "STARTS": lambda it: str(it.starts),
    "REQUEUES": lambda it: str(it.job.requeues) if it.job and it.job.requeues is not None else "",
    "GOODPUT": lambda it: "" if it.goodput is None else f"{it.goodput:.0%}",
}
"""Header -> cell."""

RIGHT = ("STEP", "DONE", "ETA", "STARTS", "REQUEUES", "GOODPUT")

LEFT_OUT = ("REQUEUES", "STARTS", "GOODPUT", "METRICS", "JOB", "STEP", "ETA")
"""Columns that a narrow terminal can do without, the least important first."""


@dataclass(frozen=True)
class StatusCommand:
    """Show all runs below some folders: state, Slurm job, step, time to the end, metrics, and why one has stopped.

      python -m evenkeel status runs/sweep --watch

    A run whose processes are gone without a word is "lost", whatever its status.json says.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Run directories, or folders with runs somewhere below."""
    watch: Flag = False
    """Show it anew every two seconds, until Ctrl-C."""
    json: Flag = False
    """For programs: a JSON list with an object for each run."""

    def __call__(self, train_options: list[str]) -> int:
        """Show them."""
        if train_options:
            raise Refusal(f"-- {' '.join(train_options)}: only `plan` takes options of train.py; leave them out")
        if self.watch and self.json:
            raise Refusal("--watch --json: one is for people, the other for programs; choose one")
        for folder in self.folders:
            if not folder.is_dir():
                raise Refusal(f"{folder}: no such folder; name run directories, or folders with runs below")
        runs = Runs(self.folders)
        if self.json:
            print(json.dumps([as_json(it) for it in runs.look()], indent=2))
            if runs.trouble:
                print(f"evenkeel: {runs.trouble}", file=sys.stderr)
            return 0
        # a pipe has no width, and its lines need not be cut
        wide = not (os.isatty(1) or os.environ.get("COLUMNS"))
        console = Console(highlight=False, width=1000 if wide else None)
        if self.watch:
            _watch(runs, console)
        else:
            console.print(_view(runs, console))
        return 0


class Runs:
    """All runs below some folders, to be looked at again and again.

    Args:
        folders: existing ones.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = list(folders)
        self.trouble = ""
        """Why Slurm cannot be asked, if it should be and cannot."""
        self._metrics: dict[Path, Metrics] = {}
        self._jobs: dict[str, JobStatus] = {}
        self._ask_at = 0.0

    def look(self) -> list[Standing]:
        """How all of them stand now."""
        paths = list({path.resolve(): path for folder in self.folders for path in find(folder)}.values())
        jobs = {path: job_id(path) for path in paths}
        self._ask({job for job in jobs.values() if job})
        return [self._standing(path, jobs[path]) for path in paths]

    def _standing(self, path: Path, job: str | None) -> Standing:
        metrics = self._metrics.setdefault(path, Metrics(path / "metrics.jsonl"))
        return standing(path, metrics, job, self._jobs.get(job) if job else None)

    def _ask(self, jobs: set[str]) -> None:
        if not jobs or (jobs <= self._jobs.keys() and time.monotonic() < self._ask_at):
            return
        self._ask_at = time.monotonic() + ASK
        try:
            self._jobs, self.trouble = ask(sorted(jobs)), ""
        except SlurmError as error:
            self._jobs, self.trouble = {}, f"Slurm cannot be asked: {error}"


def as_json(it: Standing) -> dict[str, Any]:
    """A run for programs. Absent facts are null; seconds and parts of 1, never percent."""
    facts = asdict(it)
    job = facts.pop("job") or {}
    known = {name: job.get(name) for name in ("state", "reason", "nodes", "requeues")}
    return facts | {"job": {"id": facts.pop("job_id")} | known if it.job_id else None}


def _watch(runs: Runs, console: Console) -> None:
    with CtrlC() as ctrl_c, Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while not ctrl_c.pressed:
            view = _view(runs, console)
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                console.print(view)
            ctrl_c.wait(REDRAW)


def _view(runs: Runs, console: Console) -> RenderableType:
    """The table, and under it, for every run that needs one, the reason why."""
    found = runs.look()
    if not found:
        return Text(f"no run below {', '.join(map(str, runs.folders))}")
    notes = [Text(f"{it.run}: {it.why}", style=COLOURS[it.state]) for it in found if it.why]
    if runs.trouble:
        notes.append(Text(runs.trouble, style="magenta"))
    return Group(_table(found, console), *notes)


def _table(found: list[Standing], console: Console) -> Table:
    """With as many columns as there is room for, and none that is empty in every line."""
    names = [name for name, cell in COLUMNS.items() if any(map(cell, found))]
    unlimited = console.options.update(max_width=10**6)
    for leave_out in ("", *LEFT_OUT):
        names = [name for name in names if name != leave_out]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in names:
            needed = name == "RUN"  # it is broken into lines where nothing else helps, the others are not
            table.add_column(name, justify="right" if name in RIGHT else "left", no_wrap=not needed, overflow="fold")
        for it in found:
            table.add_row(*(Text(COLUMNS[name](it), style=_style(name, it)) for name in names))
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    return table


def _style(column: str, it: Standing) -> str:
    return COLOURS[it.state] if column == "STATE" else ""


def _job(it: Standing) -> str:
    return str(it.job) if it.job else "?"


def _metrics(it: Standing) -> str:
    """The loss of training, and what the last evaluation has measured besides a loss."""
    names = [name for name in it.metrics if (name.partition("/")[0] == TRAIN) == (name.partition("/")[2] == "loss")]
    return "  ".join(f"{name} {_number(it.metrics[name])}" for name in names)


def _number(value: Any) -> str:
    return "nan" if value is None else f"{value:.4f}" if isinstance(value, int | float) else str(value)

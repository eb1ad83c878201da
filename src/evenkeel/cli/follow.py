"""`python -m evenkeel follow`: show one run live until it ends. Only reads."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console, Group
from rich.live import Live

from ..common.display import Line, styled
from ..common.errors import FAILED, Refusal
from ..common.keyboard import CtrlC
from ..common.naming import TRAIN, eta, figures, in_epoch, progress, rates, shown, time_spent
from ..resilience.interruption import KEYBOARD, STOPPED
from ..run.earlier_run import is_run
from ..run.records import LINE_SECONDS, goodput_to_show, read_config, values_of, verified
from .status import STYLES, Metrics, RunStatus, headline, status_of

POLL = 0.5  # seconds between two looks at the run
SURE = 3.0  # seconds a run must look lost, because torchrun may be restarting its ranks
CODES = {"finished": 0, "stopped": STOPPED, "failed": FAILED, "lost": FAILED}


@dataclass(frozen=True)
class FollowCommand:
    """Show a run live until it ends, or a Slurm job over its requeues.

    Example: python -m evenkeel follow runs/classify

    Exit code: 0 finished, 1 failed or killed, 2 refused, 75 cancelled or stopped. Ctrl-C (130) ends only this command.
    """

    run_dir: tyro.conf.Positional[Path]
    """Run directory."""

    def __call__(self) -> int:
        """Follow it."""
        code: int | None = None
        with contextlib.suppress(ModuleNotFoundError):  # launch/slurm may be deleted
            from ..launch.slurm.follow import follow

            code = follow(self.run_dir)
        if code is not None:
            return code
        if not is_run(self.run_dir):
            raise Refusal(f"{self.run_dir}: no run there and no Slurm job; name a run directory")
        with CtrlC() as ctrl_c:
            return _Follower(self.run_dir).to_the_end(ctrl_c)


class Records(Metrics):
    """The figures of a run, and its new records."""

    def reset(self) -> None:
        """The file is a new one."""
        super().reset()
        self.new: list[dict[str, Any]] = []

    def take(self, record: dict[str, Any]) -> None:
        """Add a record."""
        super().take(record)
        self.new.append(record)


class _Follower:
    def __init__(self, path: Path) -> None:
        self.path, self.metrics = path, Records(path / "metrics.jsonl")
        self.config = read_config(path / "config.toml")
        self.console = Console(highlight=False, soft_wrap=True)
        # on a terminal training moves a bar; elsewhere it prints lines
        self.drawn = self.console.is_terminal and os.environ.get("TERM") not in ("dumb", "unknown")
        self.values: dict[str, float | None] = {}  # at the record that is printed
        self.hints: list[str] = []
        self.begun = False
        self.last_line = -math.inf  # when the last line of training was recorded that was printed

    def to_the_end(self, ctrl_c: CtrlC) -> int:
        """Show the run; returns the exit code as `FollowCommand` says."""
        lost_since = math.inf
        with Live(console=self.console, auto_refresh=False) as live:
            while not ctrl_c.wait(POLL * self.begun):
                run = status_of(self.path, self.metrics)
                self.report(run)
                if self.drawn:
                    live.update(self.panel(run), refresh=True)
                lost_since = min(lost_since, time.monotonic()) if run.state == "lost" else math.inf
                if run.state in CODES and (run.state != "lost" or time.monotonic() - lost_since > SURE):
                    self.say(f"evenkeel: {run.state} at step {run.step}{': ' if run.why else ''}{run.why} -> {run.run}")
                    return CODES[run.state]
        self.say(f"evenkeel: continues; `python -m evenkeel follow {shlex.quote(str(self.path))}` follows it again")
        return KEYBOARD

    def report(self, run: RunStatus) -> None:
        """Print what is new; at first only the last line of training."""
        new, self.metrics.new = self.metrics.new, []
        self.values = self.values or headline(run.metrics)
        for record in new if self.begun else [record for record in new if record["kind"] == TRAIN][-1:]:
            if (text := self.line(record, run)) and (record["kind"] != TRAIN or self.is_due(record, run)):
                self.say(text)
        for hint in run.hints if not self.drawn else ():
            if hint not in self.hints:
                self.say(f"hint: {hint}")
        self.hints, self.begun = run.hints, True

    def is_due(self, record: dict[str, Any], run: RunStatus) -> bool:
        """Whether to print a line of training, as the job's own console does: one every few seconds, and the last."""
        soon = 0 <= record["time"] - self.last_line < LINE_SECONDS  # negative if the clock was set back
        if self.drawn or (soon and record["step"] != run.total_steps):
            return False
        self.last_line = record["time"]
        return True

    def line(self, record: dict[str, Any], run: RunStatus) -> str:
        """The line that the job's console prints for a record; empty for most kinds."""
        step, kind = record["step"], record["kind"]
        self.values |= headline(values_of(record))
        if kind == TRAIN:
            at, metrics, speed, more = self.facts(record, run)
            return progress(step, run.total_steps, at, *metrics, *speed, eta(run.eta), *more)
        if kind == "eval":
            return progress(step, run.total_steps, shown(values_of(record)))
        if kind == "start":
            return progress(step, run.total_steps, f"attempt {record.get('attempt')}")
        return f"step {step}: {kind}: {record['reason']}" if isinstance(record.get("reason"), str) else ""

    def facts(self, record: dict[str, Any], run: RunStatus) -> tuple[str, list[str], list[str], list[str]]:
        """Epoch, metrics, speed and how the time is spent, at a training record."""
        epoch, steps = record.get("epoch"), self.config.get("max_steps")
        epochs = None if steps and steps == run.total_steps else self.config.get("epochs")
        at = in_epoch(math.ceil(epoch), epochs) if isinstance(epoch, int | float) and epoch > 0 else ""
        productive = goodput_to_show(run.goodput, run.seconds, run.starts)
        return at, figures(self.values), rates(record), time_spent(record, productive)

    def panel(self, run: RunStatus) -> Group:
        """The line with the bar, as on the job's own terminal; below it the reason of the state, and hints."""
        latest = self.metrics.latest.get(TRAIN)
        at, metrics, speed, more = self.facts(latest, run) if latest else ("", [], [], [])
        notes = [(run.why, STYLES.get(run.state, "red"))] * bool(run.why) + [(f"hint: {it}", "") for it in run.hints]
        notes += [(text, "red" if run.alarms else "")] if (text := verified(run.verified, run.alarms)) else []
        line = Line(run.step, run.total_steps or 0, [run.state, eta(run.eta), *speed, *metrics, at, *more])
        return Group(line, *(styled(text, style) for text, style in notes))

    def say(self, text: str) -> None:
        self.console.print(styled(text))

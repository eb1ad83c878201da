"""`python -m evenkeel status`: all runs below some folders, one line each. Only reads; Slurm is optional.

A run's folder is not enough: the status.json of a run that was killed says "running" for ever. So the state of a run
also depends on the lock of its process, on torchrun's process, and on Slurm's state of its job.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Table

from ..common.display import plain, say, styled
from ..common.errors import Refusal
from ..common.files import MOST
from ..common.keyboard import CtrlC
from ..common.naming import TRAIN, shown
from ..common.processes import stat
from ..config import Flag
from ..run.identity import ASIDE
from ..run.launch_token import is_alive
from ..run.records import YOUNG, Tail, goodput, ledger, read_facts, values_of, verified

if TYPE_CHECKING:
    from ..launch.slurm.jobs import JobStatus

State = Literal["queued", "running", "finished", "stopped", "failed", "lost", "unknown"]
"""lost: it was running, and none of its processes is alive. unknown: this machine cannot see whether one is."""

STYLES = {"queued": "yellow", "running": "green", "finished": "bold", "stopped": "yellow", "unknown": "magenta"}
LEFT_ALIGNED = ("RUN", "STATE", "JOB", "METRICS")
DISPENSABLE = ("REQUEUES", "ATTEMPTS", "GOODPUT", "METRICS", "JOB", "STEP", "ETA")  # left out in this order, to fit

REDRAW = 2.0  # seconds between two looks at the runs with --watch
ASK = 10.0  # seconds between two questions to Slurm's controller, which serves all users
RECENT = 20  # lines of metrics.jsonl that give the present speed
SILENCE = 600.0  # seconds without a new line after which a run on another machine counts as dead


@dataclass(frozen=True)
class StatusCommand:
    """Show all runs: state, step, time left, metrics, why they ended.

    Example: python -m evenkeel status runs/sweep --watch

    A run whose processes were killed is "lost", although its status.json says "running". GOODPUT is the share of the
    time that went into steps; a run of less than a minute shows none, because most of that is its start.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("runs"),)
    """Run directories, or folders with runs somewhere below."""
    watch: Flag = False
    """Update the table every two seconds, until Ctrl-C."""
    json: Flag = False
    """For programs: print a JSON list with an object for each run."""

    def __call__(self) -> int:
        """Print the table or the list."""
        if self.watch and self.json:
            raise Refusal("--watch --json: a table for people, or JSON for programs; choose one")
        for folder in self.folders:
            if not folder.is_dir():
                raise Refusal(f"{folder}: no such folder; name run directories, or folders with runs below")
        runs = Runs(self.folders)
        if self.json:
            say(json.dumps([as_json(run) for run in runs.look()], indent=2))
            if runs.trouble:
                say(f"evenkeel: {runs.trouble}", to_stderr=True)
            return 0
        piped = not (os.isatty(1) or os.environ.get("COLUMNS"))  # then lines need not be cut
        console = Console(highlight=False, width=1000 if piped else None)
        if not self.watch:
            console.print(_view(runs, console))
            return 0
        with CtrlC() as ctrl_c, Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while not ctrl_c.pressed:
                live.update(_view(runs, console), refresh=True)
                ctrl_c.wait(REDRAW)
        return 0


@dataclass(frozen=True)
class RunStatus:
    """The state and the progress of one run."""

    run: str  # its folder, as it was found
    state: State
    why: str  # why the run is in that state; empty if there is nothing to explain
    step: int  # optimizer steps done
    total_steps: int | None  # None: the run has not written it yet
    eta: float | None  # seconds to the end at the present speed; None unless the run is running
    metrics: dict[str, float | None]
    """By full name: those of the last training line and of the last evaluation. None: not finite."""
    starts: int  # attempts so far
    seconds: float  # of the run's time, over all its starts
    goodput: float | None  # productive share of it, 0 .. 1
    hints: list[str]  # see run/hints.py
    verified: int  # steps by --verify-every
    alarms: list[str]  # what it has found, in a line each
    heard: float | None  # when the run last wrote something, in seconds since the epoch
    job_id: str | None
    job: JobStatus | None  # the state of the Slurm job; None: there is no job, or Slurm cannot be asked


class Runs:
    """All runs below some existing folders; `look` may be called repeatedly."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = list(folders)
        self.trouble = ""
        """Why Slurm does not answer, if there are jobs."""
        self._metrics: dict[Path, Metrics] = {}
        self._jobs: dict[str, JobStatus] = {}
        self._ask_at = 0.0

    def look(self) -> list[RunStatus]:
        """The present status of each run."""
        paths = {path.resolve(): path for folder in self.folders for path in find(folder)}.values()
        jobs = self._slurm_jobs(paths)
        for path in paths:
            self._metrics.setdefault(path, Metrics(path / "metrics.jsonl"))
        return [status_of(path, self._metrics[path], *jobs.get(path, (None, None))) for path in paths]

    def _slurm_jobs(self, runs: Iterable[Path]) -> dict[Path, tuple[str, JobStatus | None]]:
        """Run -> the id of the Slurm job that last worked on it, and that job's state."""
        try:
            from ..launch.slurm.jobs import SlurmError, ask, load
        except ImportError:  # launch/slurm may be deleted
            return {}
        ids = {}
        for run in runs:
            try:
                record = load(run)
            except (OSError, ValueError):
                continue
            if record:
                ids[run] = record.job_id
        if ids and (time.monotonic() >= self._ask_at or not self._jobs.keys() >= set(ids.values())):
            self._ask_at = time.monotonic() + ASK
            try:
                self._jobs, self.trouble = ask(sorted(set(ids.values()))), ""
            except SlurmError as error:
                self._jobs, self.trouble = {}, f"Slurm does not answer: {error}"
        return {run: (job_id, self._jobs.get(job_id)) for run, job_id in ids.items()}


class Metrics(Tail):
    """The last values and the speed of a run, from its metrics.jsonl, in little memory."""

    def reset(self) -> None:
        """The file is a new one: the run was started over."""
        self.last: dict[str, Any] = {}
        self.latest: dict[str, dict[str, Any]] = {}
        """The last record of each kind; `last` is the last of all."""
        self._ends: list[dict[str, Any]] = []  # the first and the last of each attempt, which the ledger needs
        self._points: deque[tuple[float, int]] = deque(maxlen=RECENT)  # (time, step) in this attempt

    def take(self, record: dict[str, Any]) -> None:
        """Add a record."""
        kind = record["kind"]
        self.last = self.latest[kind] = record
        if "spent" in record:
            if kind != "start" and self._ends and self._ends[-1]["kind"] != "start":
                self._ends.pop()
            self._ends.append(record)
        if kind == "start":
            self._points.clear()
        if kind in ("start", "train"):
            self._points.append((record["time"], record["step"]))

    def ledger(self) -> dict[str, float]:
        """The seconds of the run so far, by account."""
        return ledger(self._ends)

    def pace(self) -> float | None:
        """Seconds per step, over the last steps."""
        points = list(self._points)
        points = points[1:] if len(points) > 2 else points  # the first step of an attempt takes longer
        steps = points[-1][1] - points[0][1] if points else 0
        return (points[-1][0] - points[0][0]) / steps if steps > 0 else None


def find(folder: Path) -> Iterator[Path]:
    """All runs at or below a folder, by name, except those that --fresh has moved aside."""
    seen = set[str]()
    for path, below, files in os.walk(folder, followlinks=True):  # runs may be links to another disk
        if (real := os.path.realpath(path)) in seen:
            below.clear()
            continue
        seen.add(real)
        if {"config.toml", "status.json"} <= set(files) or Path(path, "slurm", "job.json").is_file():
            below.clear()
            yield Path(path)
        below[:] = sorted(name for name in below if not name.startswith(".") and not re.fullmatch(ASIDE, name))


def status_of(run: Path, metrics: Metrics, job_id: str | None = None, job: JobStatus | None = None) -> RunStatus:
    """The status of a run.

    Args:
        run: its folder.
        metrics: of this run; brought up to date here.
        job_id: of the Slurm job that last worked on it, if there was one.
        job: that job's state; None: Slurm cannot be asked.
    """
    metrics.update()
    try:
        status, trouble = read_facts(run / "status.json")
    except OSError as error:
        status, trouble = {}, f"status.json cannot be read: {error}"
    heard = max(metrics.last.get("time", 0.0), status.get("time", 0.0)) or None
    state, why = _judge(run, status, heard, job_id, job) if "state" in status or not trouble else ("unknown", trouble)
    if state == "running" and not why:  # it may have restarted after the death of a rank, or a failure
        last = metrics.latest.get("start", {}).get("last_end") or status.get("last_failure")
        why = f"attempt {len(status.get('world_sizes', []))} goes on after: {last}" if last else ""
    step = metrics.last.get("step", status.get("step", 0))
    if status.get("state") in ("finished", "stopped", "failed"):
        step = status.get("step", step)
    total, pace, seconds = status.get("total_steps"), metrics.pace(), metrics.ledger()
    left = math.nan if not total or pace is None else (total - step) * pace
    return RunStatus(
        run=str(run),
        state=state,
        why=why,
        step=step,
        total_steps=total,
        eta=left if state == "running" and 0 <= left <= MOST else None,
        metrics=values_of(metrics.latest.get("train", {})) | values_of(metrics.latest.get("eval", {})),
        starts=len(status.get("world_sizes", [])),
        seconds=round(sum(seconds.values()), 3),
        goodput=goodput(seconds) if any(seconds.values()) else None,
        heard=heard,
        verified=status.get("verified", 0),
        alarms=status.get("alarms", []),
        hints=[text for text in status.get("hints", {}).values() if text],
        job_id=job_id,
        job=job,
    )


def headline(metrics: dict[str, float | None]) -> dict[str, float | None]:
    """The training loss, and the metrics of the last evaluation except its losses."""
    return {name: it for name, it in metrics.items() if name.startswith(f"{TRAIN}/") == name.endswith("/loss")}


def _judge(
    run: Path, status: dict[str, Any], heard: float | None, job_id: str | None, job: JobStatus | None
) -> tuple[State, str]:
    """The state, and why."""
    said, reason, host = status.get("state"), str(status.get("reason") or ""), status.get("host")
    locked, silent = _is_locked(run), time.time() - (heard or 0)
    if said == "finished":
        return "finished", reason if status.get("stopped_early") else ""
    if locked and said not in ("stopped", "failed"):
        return "running", f"no output for {_duration(silent)}" if heard and silent > SILENCE else ""
    if said in ("running", "failed") and any(map(is_alive, status.get("launch", ()))):
        return "running", f"torchrun restarts it after: {reason}" if reason else "torchrun restarts its ranks"
    if job and job.is_waiting:
        return "queued", reason
    if job and job.is_known and not job.is_over:
        return "running", f"its job goes on after: {reason}" if reason else ""
    if said in ("stopped", "failed"):
        return said, reason
    if job and job.is_over:
        return ("lost" if said else "stopped" if job.state == "CANCELLED" else "failed"), f"job {job_id}: {job}"
    if not said:
        return "unknown", f"job {job_id} left no files, and Slurm {'does not know it' if job else 'does not answer'}"
    if host == socket.gethostname():
        alive = locked is None and stat(status.get("pid", 0))
        return (
            ("running", "") if alive else ("lost", "its process is gone and recorded no reason; perhaps it was killed")
        )
    if silent > SILENCE:
        return "lost", f"it ran on {host}, and has written nothing for {_duration(silent)}"
    return "unknown", f"it runs on {host}, which is not visible from here; last output {_duration(silent)} ago"


def _is_locked(run: Path) -> bool | None:
    """Whether a process has locked the run, here or on a machine that shares the folder; None: not known.

    Takes the lock as a reader for a moment; a start of the run waits longer than that.
    """
    try:
        with (run / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None
    return False


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def as_json(run: RunStatus) -> dict[str, Any]:
    """A run as JSON. Unknown facts are null; times are in seconds, shares between 0 and 1."""
    facts = asdict(run)
    job, job_id = facts.pop("job") or {}, facts.pop("job_id")
    known = {name: job.get(name) for name in ("state", "reason", "nodes", "requeues")}
    return facts | {"job": {"id": job_id} | known if job_id else None}


def _view(runs: Runs, console: Console) -> Group:
    """The table, and below it a line for each run with a reason for its state."""
    found = runs.look()
    if not found:
        return Group(styled(f"no run below {', '.join(map(str, runs.folders))}"))
    explained = [run for run in found if run.why]
    notes = [styled(f"{run.run}: {run.state}: {run.why}", style=STYLES.get(run.state, "red")) for run in explained]
    notes += [styled(f"{run.run}: hint: {hint}") for run in found if run.state == "running" for hint in run.hints]
    checked = {run.run: verified(run.verified, run.alarms) for run in found if run.state == "running" or run.alarms}
    notes += [styled(f"{run}: {text}") for run, text in checked.items() if text]
    return Group(_table(found, console), *notes, *[styled(runs.trouble, style="magenta")] * bool(runs.trouble))


def _table(found: list[RunStatus], console: Console) -> Table:
    """As many columns as fit, without those that are empty in every line."""
    rows = [{name: plain(cell) for name, cell in _cells(run).items()} for run in found]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0] if any(r[name] for r in rows)}
    for name in DISPENSABLE:
        if sum(widths.values()) + 2 * (len(widths) - 1) > console.width:
            widths.pop(name, None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in widths:
        justify: JustifyMethod = "left" if name in LEFT_ALIGNED else "right"
        table.add_column(name, justify=justify, no_wrap=name != "RUN", overflow="fold")
    for run, row in zip(found, rows, strict=True):
        state = styled(run.state, style=STYLES.get(run.state, "red"))
        table.add_row(*(state if name == "STATE" else styled(row[name]) for name in widths))
    return table


def _cells(run: RunStatus) -> dict[str, str]:
    return {
        "RUN": run.run,
        "STATE": run.state,
        "JOB": f"{run.job_id} {run.job or '?'}" if run.job_id else "",
        "STEP": f"{run.step}/{run.total_steps or '?'}",
        "DONE": f"{run.step / run.total_steps:.0%}" if run.total_steps else "",
        "ETA": "" if run.eta is None else str(timedelta(seconds=round(run.eta))),
        "METRICS": shown(headline(run.metrics)),
        "ATTEMPTS": str(run.starts),
        "REQUEUES": str(run.job.requeues) if run.job and run.job.requeues is not None else "",
        "GOODPUT": "" if run.goodput is None else "<1 min" if run.seconds < YOUNG else f"{run.goodput:.0%}",
    }

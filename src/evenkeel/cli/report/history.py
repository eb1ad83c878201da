"""A run's files, read line by line: its options, measured curves, attempts and events."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...common.errors import Refusal
from ...common.naming import TRAIN
from ...config import HARMLESS, Config
from ...run.checkpoint import Checkpoints
from ...run.records import attempt_ends, goodput, ledger, read_config, read_facts, read_records, values_of

ENDINGS = {"finish": "finished", "stop": "stopped", "failure": "failed"}
"""Kind of an attempt's last record -> how it ended. Without such a record it was killed."""

LARGEST = 2**53
"""The largest number that a run writes; figures cannot show larger ones."""


@dataclass
class Curve:
    """A measured value by step. A step that was done again has only its last value."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add a value; of the same step it replaces the last one."""
        self.cut(step - 1)
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Remove the values after a step."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()


@dataclass
class Attempt:
    """One start of a run, from its "start" record on. Times are in seconds since 1970."""

    number: int
    ranks: int
    first_step: int
    begun: float
    """When its rank 0 was started."""
    ready: float
    """When its first step began."""
    until: float
    """Time of its last record."""
    last_step: int
    times: array[float] = field(default_factory=lambda: array("d"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    """Time and step of each record."""
    ending: str = ""
    """A value of ENDINGS, "killed" or "running"."""
    reason: str = ""


@dataclass
class History:
    """A run according to its files. Make it with :func:`read_history`.

    Attributes:
        curves: by full name, SET/METRIC; `train/...` are of steps, the others of evaluations.
        marks: kind of an event -> (time, step) of each.
        again: steps that were done again, as far as the records tell.
        seconds: the ledger, by account.
        memory: bytes by part of each rank, as last recorded.
        best: (metric, "max" or "min") by which the run keeps its best checkpoint.
    """

    path: Path
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    state: str = "unknown"
    why: str = ""
    best: tuple[str, str] | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    marks: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    memory: list[dict[str, int]] = field(default_factory=list)
    again: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: ledger([]))

    @property
    def step(self) -> int:
        """The last step that is known to be done."""
        return max(int(self.status.get("step", 0)), self.attempts[-1].last_step if self.attempts else 0)

    @property
    def starts(self) -> int:
        """Attempts, including those without a step or a record."""
        return max(len(self.attempts), len(self.status.get("world_sizes", [])))

    @property
    def goodput(self) -> float | None:
        """The productive share of the run's time; None before there is a record of it."""
        return goodput(self.seconds) if any(self.seconds.values()) else None

    def best_value(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the best evaluation; None before the first.

        By the metric that decides the best checkpoint, else by a loss.
        """
        losses = sorted(name for name in self.curves if name.endswith("/loss") and not name.startswith(f"{TRAIN}/"))
        name, direction = self.best or (losses[0] if losses else "", "min")
        if name not in self.curves:
            return None
        curve = self.curves[name]
        value = (max if direction == "max" else min)(curve.values)
        return name, value, curve.steps[curve.values.index(value)]

    def take(self, record: dict[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        kind, step, time = record["kind"], record["step"], record["time"]
        if kind == "start":
            self._start(record)
        elif kind == "memory":
            self.memory = record.get("memory", [])
        elif kind != "train":
            self.marks.setdefault(kind, []).append((time, step))
        for name, value in values_of(record).items():
            if value is not None and -LARGEST < value < LARGEST:
                self.curves.setdefault(name, Curve()).add(step, value)
        if self.attempts:
            attempt = self.attempts[-1]
            attempt.until, attempt.last_step = time, max(step, attempt.last_step)
            if kind in ENDINGS:
                attempt.ending, attempt.reason = ENDINGS[kind], str(record.get("reason") or "")
            attempt.times.append(time)
            attempt.steps.append(step)

    def _start(self, record: dict[str, Any]) -> None:
        step, time = record["step"], record["time"]
        if self.attempts:
            last = self.attempts[-1]
            end = str(record.get("last_end") or "")
            if " killed" in end:  # the other ranks have only recorded what followed, or in which step one hung
                last.ending, last.reason = "killed", f"{end}; {last.reason}" if " hung " in end and last.reason else end
            last.ending, last.reason = last.ending or "killed", last.reason or end
            last.last_step = max(last.last_step, step)  # it was saved, though its last steps may not be logged
            self.again += last.last_step - step
        for curve in self.curves.values():
            curve.cut(step)
        ranks, begun = record.get("world_size", 0), max(0.0, time - sum(record.get("spent", {}).values()))
        self.attempts.append(Attempt(len(self.attempts) + 1, ranks, step, begun, time, time, step))


def read_histories(paths: tuple[Path, ...]) -> list[History]:
    """Each run, under the name of its folder, or under its path where two folders have the same name."""
    names = [path.resolve().name for path in paths]
    return [
        read_history(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def read_history(path: Path, name: str) -> History:
    """Read a run's files, even if most are missing.

    Raises:
        Refusal: the folder is no run's, or may not be read.
    """
    files = [path / file for file in ("config.toml", "status.json", "metrics.jsonl")]
    if not any(file.is_file() for file in files):
        raise Refusal(f"{path}: no run there (no {', '.join(file.name for file in files)}); name a run directory")
    history = History(path, name)
    try:
        history.options = read_config(files[0]) if files[0].is_file() else {}
        history.status, trouble = read_facts(files[1])
        for record in read_records(files[2]):
            history.take(record)
        history.seconds = ledger(attempt_ends(files[2]))
    except OSError as error:
        raise Refusal(f"{path}: cannot be read: {error.strerror or error}; fix that") from None
    history.curves = {name: curve for name, curve in history.curves.items() if curve.steps}  # all may be done again
    history.state, history.why = _state(path, history.status)
    history.why = history.why or trouble
    if newest := Checkpoints(path / "checkpoints", 1).newest_manifest():
        history.best = newest.best_by
    if history.attempts and not (last := history.attempts[-1]).ending:
        last.ending = "running" if history.state == "running" else "killed"
    return history


def _state(path: Path, status: Mapping[str, Any]) -> tuple[str, str]:
    """The state of a run and why; from its status.json only if the command `status` was removed."""
    try:
        from ..status import Metrics, status_of
    except ImportError:
        return status.get("state", "unknown"), status.get("reason", "")
    if not status:
        return "unknown", ""
    found = status_of(path, Metrics(path / "metrics.jsonl"))
    return found.state, found.why


def differing_options(histories: Sequence[History]) -> Iterator[tuple[str, list[Any]]]:
    """(option, its value in each run) where they differ; of one run where it differs from the default, if that is
    known and the option shapes the result."""
    names = dict.fromkeys(name for history in histories for name in history.options)
    defaults = {it.name: list(it.default) if isinstance(it.default, tuple) else it.default for it in fields(Config)}
    for name in names:
        values = [history.options.get(name, defaults.get(name)) for history in histories]
        alone = [defaults.get(name)] if len(values) == 1 and name not in HARMLESS else []
        if any(value != values[0] for value in values + alone):
            yield name, values

"""Reads what a run has written about itself: status.json, summary.json, metrics.jsonl, config.toml.

A failed disk or an editor may have damaged these files. Damaged parts are left out here, so that no reader has to check
types.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..common.errors import Refusal
from ..common.files import alike, read_json
from ..common.naming import TEST, TRAIN, named

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)

FACTS: dict[str, Any] = {
    **dict.fromkeys(("state", "host", "reason", "last_failure", "requeues", "wandb_id", "weights_sha256"), ""),
    **dict.fromkeys(("shares", "run_id", "order"), ""),
    **dict.fromkeys(("pid", "step", "total_steps", "samples_seen", "threads", "micro_batch", "micro_batches"), 0),
    **dict.fromkeys(("fruitless", "starts", "restarts_in_place", "verified"), 0),
    **dict.fromkeys(("time", "seconds", "goodput"), 0.0),
    "alarms": [""], "launch": [""], "samples": {"": 0}, "wrong_nodes": {"": 0}, "hints": {"": ""}, "orders": {"": ""},
    "stopped_early": False, "world_sizes": [0], "digests": {"": {"equal": "", "near": [-1.0]}}, "ledger": {"": 0.0},
}  # fmt: skip
"""An example of each fact in status.json, summary.json and Slurm's count of starts."""

RECORD: dict[str, Any] = {"kind": "", "step": 0, "time": 0.0}
"""Fields of each line of metrics.jsonl."""

MORE: dict[str, Any] = {
    "spent": {"": 0.0}, "world_size": 0, "digests": {"": ""}, "differences": {"": ["", ""]}, "hosts": [""],
    "epoch": 0.0, "attempt": 0, "memory": [{"": 0}], "last_end": "",
}  # fmt: skip
"""Fields of some lines, besides values that are only shown."""

MEASURES = {"train": TRAIN, "eval": TEST, "log": TRAIN}
"""Kind of a record with values -> the set of those whose names have none, from version 0.1.0."""

NOT_MEASURED = ("kind", "step", "time", "spent", "epoch")  # what a record holds besides measurements

ACCOUNTS = ("productive", "data", "checkpoint", "evaluation", "start_up", "redone", "dead")
"""Steps; waiting for data; stalls for checkpoints; evaluations; from a process's start to its first step; steps done
again; no process, or none that survived to record it."""

YOUNG = 60.0
"""Seconds before a run's goodput is meaningful, because most of them are its start."""

LINE_SECONDS = 5.0
"""Seconds between two lines of training on a console without a progress bar."""

TAIL = 1 << 20
"""Bytes at the end of metrics.jsonl that a start reads."""


def evaluation_in(records: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    """The recorded metrics of this step; {} if there are none, or if the code or the machine has changed since."""
    for record in reversed(records):
        if record["kind"] == "eval" and record["step"] == step:
            return {name: value for name, value in record.items() if "/" in name}
        if record["kind"] == "bits" or (record["kind"] == "start" and record["step"] < step):
            break
    return {}


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts in one of a run's JSON files, and what is wrong with it; both empty where there is no such file.

    Raises:
        OSError: it may not be read.
    """
    try:
        found = {name: value for name, value in read_json(path).items() if value is not None}
    except ValueError as error:
        return {}, f"{path.name} cannot be read: {error}"
    bad = [name for name, value in found.items() if name in FACTS and not alike(value, FACTS[name])]
    trouble = f"{path.name} has been changed: {bad[0]} is {found[bad[0]]!r:.60}" if bad else ""
    return {name: value for name, value in found.items() if name not in bad}, trouble


def read_record(line: bytes, example: Mapping[str, Any] = RECORD) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or of a file with other examples; None if it is none, cut by a power failure perhaps."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(found, dict) and all(alike(found.get(name), example[name]) for name in example)
    return found if fits and all(alike(found[name], MORE[name]) for name in MORE.keys() & found.keys()) else None


def read_records(path: Path, tail: int = 0, example: Mapping[str, Any] = RECORD) -> Iterator[dict[str, Any]]:
    """The whole lines of a metrics.jsonl, none if there is no file; with ``tail`` of so many bytes at its end."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if tail and path.stat().st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline()  # the rest of a line
        for line in file:
            if record := read_record(line, example):
                yield record
            else:
                _warn(path)


@cache  # once for each file
def _warn(path: Path) -> None:
    log.warning("%s: some of its lines are damaged and are left out", path)


class Tail:
    """Base class for readers of a metrics.jsonl that grows, and need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._offset = 0
        self.reset()

    def reset(self) -> None:
        """Forget all records: the file is a new one."""
        raise NotImplementedError

    def take(self, record: dict[str, Any]) -> None:
        """Add a record."""
        raise NotImplementedError

    def update(self) -> None:
        """Take the records that are new since the last call."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._inode, self._offset = facts.st_ino, 0
                self.reset()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                if record := read_record(line):
                    self.take(record)


def values_of(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The values of a "train" or "eval" record, by full name; None: not finite. Empty for other records."""
    if record.get("kind") not in MEASURES:
        return {}
    found = {name: value for name, value in record.items() if name not in NOT_MEASURED}
    numbers = {name: value for name, value in found.items() if value is None or type(value) in (int, float)}
    finite = {
        name: value if value is None or abs(value) <= sys.float_info.max else None for name, value in numbers.items()
    }
    return named(MEASURES[record["kind"]], finite)


def ledger(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds by account, from the start of the first attempt to the last record.

    Each record has the seconds of its attempt so far (`Activity.spent`), even of one that was killed later. The time
    from there to the next start is dead, once a step is done, but not after Ctrl-C.

    Args:
        records: lines of metrics.jsonl, in order.
    """
    seconds = dict.fromkeys(ACCOUNTS, 0.0)
    spent, end, step = dict[str, float](), 0.0, 0
    for record in (record for record in records if "spent" in record):
        if record["kind"] == "start" and end:
            seconds = {name: value + spent.get(name, 0.0) for name, value in seconds.items()}
            seconds["dead"] += max(0.0, record["time"] - sum(record["spent"].values()) - end) * (step > 0)
        spent, step = record["spent"], max(step, record.get("step", 0))
        wished = record["kind"] == "stop" and record.get("reason") in ("SIGINT", "Ctrl-C")  # the latter in a notebook
        end = math.inf if wished else record["time"]
    return {name: round(value + spent.get(name, 0.0), 3) for name, value in seconds.items()}


def verified(steps: int, alarms: list[str]) -> str:
    """What --verify-every has found so far, in a line; empty without it."""
    last = f": {alarms[-1]}" if alarms else ""
    found = f"{len(alarms) or 'no'} alarm{'s' * (len(alarms) != 1)}"
    return f"{steps} steps verified, {found}{last}" if steps or alarms else ""


def attempt_ends(path: Path) -> list[dict[str, Any]]:
    """The first and the last record of each attempt in a metrics.jsonl: all that the ledger needs, and soon read."""
    found, last = list[bytes](), b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            if b'"kind": "start"' in line:
                found += [last, line]
                last = b""
            elif line.endswith(b"}\n"):  # whole
                last = line
    return [record for line in [*found, last] if (record := read_record(line))]


def goodput(seconds: dict[str, float]) -> float:
    """The productive part of all seconds, 0 .. 1."""
    return round(seconds["productive"] / max(sum(seconds.values()), 1e-9), 4)


def goodput_to_show(share: float | None, seconds: float, starts: int) -> float | None:
    """The goodput of a restarted run, once it is meaningful; otherwise it only says how long the start took."""
    return share if seconds >= YOUNG and starts > 1 else None


def read_config(path: Path) -> dict[str, Any]:
    """The options in a TOML file.

    Raises:
        Refusal: no such file, or not TOML.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise Refusal(f"{path}: is a pipe or a device, which may never end; name a file")
        options: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of which one is TOMLDecodeError
        raise Refusal(f"{path}: not TOML: {error}") from None
    return options

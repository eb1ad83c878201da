"""What a run has written of itself, for whoever reads it: status.json, summary.json, metrics.jsonl, config.toml.

A disk that failed, or somebody's editor, may have left anything in there. What is not as it was written is left out, so
that nobody who reads has to ask what type a value has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .errors import Refusal
from .files import read_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)

FACTS: dict[str, Any] = {
    "state": "",
    "host": "",
    "pid": 0,
    "time": 0.0,
    "launch": [""],
    "world_sizes": [0],
    "samples": {"": 0},
    "digests": {"": {"equal": "", "near": [0.0]}},
    "total_steps": 0,
    "threads": 0,
    "micro_batch": 0,
    "micro_batches": 0,
    "reason": "",
    "last_failure": "",
    "fruitless": 0,
    "requeues": "",
    "step": 0,
    "seconds": 0.0,
    "stopped_early": False,
    "wandb_id": "",
    "weights_sha256": "",
    "samples_seen": 0,
    "goodput": 0.0,
    "ledger": {"": 0.0},
    "starts": 0,
}
"""An example of each fact in status.json, summary.json and Slurm's count of starts."""

RECORD: dict[str, Any] = {"kind": "", "step": 0, "time": 0.0}
"""What each line of metrics.jsonl has."""

MORE: dict[str, Any] = {"spent": {"": 0.0}, "world_size": 0, "digests": {"": ""}, "differences": {"": ["", ""]}}
"""What some of them have, besides values that are only shown."""

RECORDED = {"task", "batch_size", "grace", "keep", "on_nonfinite"}
"""Options that every version writes into config.toml, and that nobody types all."""


def alike(value: Any, example: Any) -> bool:
    """Whether a value from JSON has the type of an example, and all in it that of its first; a pair is one of two, and
    an object of several has their names."""
    if isinstance(example, float):
        return type(value) in (int, float)
    if type(value) is not type(example):
        return False
    if isinstance(example, dict):
        examples = example if len(example) > 1 else dict.fromkeys(value, *example.values())
        return value.keys() == examples.keys() and all(alike(item, examples[name]) for name, item in value.items())
    if isinstance(example, list):
        return len(example) in (1, len(value)) and all(alike(item, example[0]) for item in value)
    return True


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """The facts in one of a run's JSON files, and what is wrong with it; neither where there is no such file.

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


def read_record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None: it is none, cut by a power failure for example."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(alike(found.get(name), RECORD[name]) for name in RECORD):
        return None
    return found if all(alike(found[name], MORE[name]) for name in MORE.keys() & found.keys()) else None


def read_records(path: Path, tail: int | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl that are whole.

    Args:
        path: of the file; none has no lines.
        tail: read only so many bytes at its end.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        if tail and path.stat().st_size > tail:
            file.seek(-tail, os.SEEK_END)
            file.readline()  # the end of one
        for line in file:
            if record := read_record(line):
                yield record
            else:
                _tell(path)


@cache
def _tell(path: Path) -> None:
    """Once for each file."""
    log.warning("%s: some of its lines are not as they were written, and are left out", path)


def read_config(path: Path) -> dict[str, Any]:
    """The options in a TOML file.

    Raises:
        Refusal: no such file, or not TOML.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise Refusal(f"{path}: is a pipe or a device, which may never come to its end; name a file")
        options: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of which one is TOMLDecodeError
        raise Refusal(f"{path}: not TOML: {error}") from None
    return options


def recorded_options(path: Path | None) -> dict[str, Any]:
    """What a run's folder says of options that were left open when the run began: the cut of a step ("micro_batch",
    "micro_batches") and CPU "threads". Empty where there is no run; a run of an older version may lack some."""
    if path is None:
        return {}
    try:
        status, _ = read_facts(path / "status.json")
        cut = status if status.get("micro_batch") else read_config(path / "config.toml")
    except (OSError, Refusal):
        return {}
    saved = {"threads": status.get("threads"), **{name: cut.get(name) for name in ("micro_batch", "micro_batches")}}
    return {name: value for name, value in saved.items() if type(value) is int and value}


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, of this version or an older one.

    A config.toml may be anybody's, or a copy of a run's. So it is the status.json that tells, or, where that is damaged
    or lost, a config.toml with all our options beside it or beside checkpoints.
    """
    status = path / "status.json"
    with contextlib.suppress(OSError):
        if "world_sizes" in read_facts(status)[0]:
            return True
    with contextlib.suppress(OSError, Refusal):
        if status.exists() or any(path.glob("checkpoints/step-*/manifest.json")):
            return read_config(path / "config.toml").keys() >= RECORDED
    return False

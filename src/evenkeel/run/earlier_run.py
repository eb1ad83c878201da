"""What is in a run directory before a start: a run or none, trained or not, its options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.errors import Refusal
from ..common.files import LOCK
from .checkpoint import Checkpoints
from .records import read_config, read_facts, read_records

MIRRORED = "EVENKEEL_MIRROR"
"""The environment variable with the run directory whose checkpoints a process of this node copies (--mirror)."""

RECORDED = {"task", "batch_size", "grace", "keep", "on_nonfinite"}
"""Options that every version writes into config.toml, and that no user types all of."""


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, of this version or an older one.

    Its status.json says so, or, where that is damaged or lost, a config.toml with all our options beside it or beside
    checkpoints: a config.toml alone may be a copy.
    """
    status = path / "status.json"
    with contextlib.suppress(OSError):
        if "world_sizes" in read_facts(status)[0]:
            return True
    with contextlib.suppress(OSError, Refusal):
        if status.exists() or any(path.glob("checkpoints/step-*/manifest.json")):
            return read_config(path / "config.toml").keys() >= RECORDED
    return False


def is_untrained(path: Path) -> bool:
    """Whether the run in a folder failed or was stopped before its first step, and has neither a mirror nor a
    checkpoint, weights or metrics. It may be started again with other options and data."""
    try:
        status, trouble = read_facts(path / "status.json")
        worth = trouble or MIRRORED in os.environ or status.get("state") not in ("failed", "stopped")
        return not (worth or has_trained(path, status))
    except OSError:
        return False


def has_trained(path: Path, status: Mapping[str, Any]) -> bool:
    """Whether the run in a folder, with this status, has reached a step, or has a checkpoint, weights or metrics."""
    checkpoints = path / "checkpoints"
    there = status.get("step") or (path / "model.pt").exists()
    there = there or (os.path.lexists(checkpoints) and any(it.name != LOCK for it in checkpoints.iterdir()))
    return bool(there) or any(record["step"] for record in read_records(path / "metrics.jsonl"))


def recorded_options(path: Path | None, untrained: bool | None = None) -> dict[str, Any]:
    """Values that the run has recorded for options that were left open: "micro_batch", "micro_batches" and CPU
    "threads". Empty without a run, or of one that has trained nothing; an older version may lack some. ``untrained``:
    the result of :func:`is_untrained`, if it is known."""
    if path is None or (is_untrained(path) if untrained is None else untrained):
        return {}
    try:
        status, _ = read_facts(path / "status.json")
        cut = status if status.get("micro_batch") else read_config(path / "config.toml")
    except (OSError, Refusal):
        return {}
    saved = {"threads": status.get("threads"), **{name: cut.get(name) for name in ("micro_batch", "micro_batches")}}
    if not saved["threads"] and (newest := Checkpoints(path / "checkpoints", 1).newest_manifest()):
        saved["threads"] = int(newest.fingerprint.get("threads", 0))  # of an older version
    return {name: value for name, value in saved.items() if type(value) is int and value}

"""Where the seconds of a run went, over all its attempts.

Every record in metrics.jsonl says what its attempt has spent so far (`Activity.spent`), so even one that was killed
has accounted for its time up to its last record. What lies between that and the next start is dead time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ACCOUNTS = ("productive", "data", "checkpoint", "evaluation", "start_up", "redone", "dead")
"""Steps; waiting for data; stalls for checkpoints; evaluations; from a process's start to its first step; steps done
again; no process, or none that lived to tell."""


def ledger(records: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds by account, from the start of the first attempt to the last record.

    Args:
        records: lines of metrics.jsonl, in order.
    """
    seconds = dict.fromkeys(ACCOUNTS, 0.0)
    last: dict[str, Any] | None = None
    for record in (record for record in records if "spent" in record):
        if record["kind"] == "start" and last:
            _close(seconds, last)
            seconds["dead"] += max(0.0, _began(record) - last["time"])
        last = record
    if last:
        _close(seconds, last)
    return {name: round(value, 3) for name, value in seconds.items()}


def goodput(seconds: dict[str, float]) -> float:
    """The productive part of all seconds, 0 .. 1."""
    return round(seconds["productive"] / max(sum(seconds.values()), 1e-9), 4)


def _began(record: dict[str, Any]) -> float:
    began: float = record["time"] - sum(record["spent"].values())
    return began


def _close(seconds: dict[str, float], last: dict[str, Any]) -> None:
    for account in seconds:
        seconds[account] += last["spent"].get(account, 0.0)

"""The crash loop: attempts in a row, the present one included, without a finished step ("fruitless" in status.json).

`RunDirectory.begin` counts each attempt; `Attempt.begin` ends the run if they are too many. The count is cleared by an
attempt's first finished step (`RunDirectory.record_progress`) and by a stop (`Attempt.stopped`, `Ending.stopped`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..common import keeper_link

MAX_FRUITLESS = 3
"""Maximum consecutive attempts that die before their first step."""

CLEARED: Mapping[str, Any] = MappingProxyType({"fruitless": 0})
"""The facts of status.json that clear the count."""


def counted(status: Mapping[str, Any], restarted: bool) -> dict[str, Any]:
    """The facts of status.json that count an attempt which begins. `restarted`: the launch has begun the run itself."""
    fruitless, last_failure = status.get("fruitless", 0), status.get("last_failure")
    if fruitless <= MAX_FRUITLESS:  # beyond, the recorded reason is only that so many attempts died
        last_failure = status.get("reason") if status.get("state") == "failed" else None
    requeues = os.environ.get("SLURM_RESTART_COUNT", "0")
    # the user has typed the command again; or a requeue, which is not the job's fault (--max-requeues limits these)
    if not restarted or requeues != status.get("requeues", "0"):
        fruitless = 0
    return {"fruitless": fruitless + 1, "last_failure": last_failure, "requeues": requeues}


def reason_to_end(status: Mapping[str, Any]) -> str:
    """Why the run ends here, by the status of an attempt that has begun; "" if it may go on."""
    if status["fruitless"] <= MAX_FRUITLESS:
        return ""
    last = status["last_failure"] or os.environ.get(keeper_link.LAST_END)
    how = f"; the last: {last}" if last else ", without an error: killed from outside, perhaps out of memory"
    return f"{MAX_FRUITLESS} consecutive attempts died before they finished a step{how}"

"""What is said of a finished run: summary.json, the closing line, and what trackers get of the best checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.display import near
from ..common.naming import shown
from ..common.phases import activity
from .attempt import Attempt
from .manifest import read_manifest, step_of
from .records import goodput, goodput_to_show, ledger, read_records
from .run_directory import RunDirectory
from .state_files import Damaged
from .tracking import Tracker


def summary_of(attempt: Attempt, directory: RunDirectory, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The content of summary.json, apart from the weights.

    Args:
        attempt: the run's last.
        directory: rank 0's handle on the folder.
        step: the last.
        metrics: the last evaluation.
    """
    now = {"kind": "summary", "time": time.time(), "spent": activity.spent()}
    spent, plan = ledger([*read_records(attempt.path / "metrics.jsonl"), now]), attempt.plan
    return {
        "state": "finished",
        "step": step,
        "epoch": step / plan.steps_per_epoch,
        "samples_seen": plan.samples_seen(step),
        "metrics": metrics,
        "restarts": directory.attempts - 1,
        "restarts_in_place": directory.status.get("restarts_in_place", 0),
        "world_sizes": directory.status["world_sizes"],
        "bits_void_from": attempt.provenance.bits_void_from,
        "seconds": directory.seconds,
        "goodput": goodput(spent),
        "ledger": spent,
    }


def report_finished(
    attempt: Attempt, tracker: Tracker, step: int, metrics: dict[str, float], spent: Mapping[str, float], why: str
) -> None:
    """Print the closing line, and close the tracker. `spent`: the ledger; `why`: the reason of an early stop, or ""."""
    tracker.event("finish", step)
    dead = spent["dead"]
    seconds = sum(spent.values()) - dead
    share = goodput_to_show(spent["productive"] / max(seconds, 1e-9), seconds + dead, tracker.attempt)
    took = f"{seconds:.1f} s" + ("" if share is None else f" ({100 * share:.0f} % of it training)")
    if dead >= 1:
        took += f", and was down for {dead:.0f} s more (no process, or a hang)"
    took += f", {why}" if why else ""
    result = f": {shown(metrics)}" if metrics else ""
    best = _best(attempt)
    other = f"; the best: {near(best)}" if best and step_of(best) != step else ", also the best" if best else ""
    attempt.say(f"evenkeel: finished in {took}{result}  -> {near(attempt.path) / 'model.pt'} (last step{other})")
    tracker.send(step, _best_metrics(best, step, metrics))
    tracker.close()


def _best(attempt: Attempt) -> Path | None:
    """The best checkpoint, if there is one and the disk can say so: the run is over, and not to fail any more."""
    with contextlib.suppress(OSError):
        return attempt.checkpoints.best_path()
    return None


def _best_metrics(best: Path | None, step: int, metrics: dict[str, float]) -> dict[str, float]:
    """The evaluation of the best checkpoint, else the last one, for trackers."""
    with contextlib.suppress(Damaged):
        if best:
            step, metrics = step_of(best), read_manifest(best).metrics
    return {"best/step": step, **{f"best/{name}": value for name, value in metrics.items()}}

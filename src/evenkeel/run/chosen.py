"""Which checkpoint of a run a command means."""

from __future__ import annotations

from pathlib import Path

from ..common.errors import Refusal
from .checkpoint import Checkpoints
from .earlier_run import is_run
from .manifest import Provenance, step_folders, step_of


def best_in(folder: Path) -> Path | None:
    """The best checkpoint in a folder of them, by the metric that the newest manifest names; None if there is none."""
    newest = Checkpoints(folder, 1).newest_manifest()
    return Checkpoints(folder, 1, Provenance(newest.best_by)).best_path() if newest else None


def chosen(run: Path, name: str) -> Path:
    """What `--checkpoint` of a command means: "last", the run itself, where the newest whole one is taken; "best"; or a
    step's folder. Refused if there is no such one."""
    steps = {step_of(path): path for path in step_folders(run / "checkpoints")}
    if not steps:
        if not run.exists():
            raise Refusal(f"{run}: no such folder; name a run directory")
        why = "this run has saved no checkpoint yet" if is_run(run) else "no checkpoint there; name a run directory"
        raise Refusal(f"{run}: {why}")
    if name == "last":
        return run
    if name == "best":
        if not (best := best_in(run / "checkpoints")):
            raise Refusal("--checkpoint best: no checkpoint of this run has the metric of its task's `best`; use last")
        return best
    if not name.isdecimal() or int(name) not in steps:
        there = ", ".join(map(str, steps))
        raise Refusal(f"--checkpoint {name}: give last, best or one of the steps {there}")
    return steps[int(name)]

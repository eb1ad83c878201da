"""Whether a job may use a folder: empty, or with the same run in it, or with one that it moves aside."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..common.arguments import flag
from ..common.display import near
from ..common.errors import Ended, Refusal
from ..common.files import make_folder, make_unused, try_lock, unlock, write_json
from ..config import changed_options
from .earlier_run import is_run, is_untrained
from .manifest import step_folders
from .records import read_config, read_facts

OURS = (
    "metrics.jsonl", "metrics.csv", "ranks.jsonl", "summary.json", "model.pt", "checkpoints", "logs", "compiled",
    "streams", "wandb", "tensorboard", "trackers", "media", "predictions", "profile", "config.toml", "report.html",
    "audit.json")  # fmt: skip
"""Files of a run in its folder besides status.json, and those of `evenkeel report` and `audit`."""

ASIDE = r"(.*\.)?old-\d{8}-\d{6}(-\d+)?"
"""Names of folders with runs that were moved aside."""

BEFORE_A_RUN = {"logs": r"attempt-\d+", "slurm": r"job[.-].*|errors|starts-.*|\d{8}-\d{6}(-\d+)?|\..*\.tmp"}
"""Folders that Slurm, another rank or a failed start may have made before the run, and what is in them."""


@dataclass(frozen=True)
class Identity:
    """The facts that identify a run. Two starts of one run may differ only in harmless options."""

    options: dict[str, Any]
    """The options, from `config.saved_options`."""
    harmless: frozenset[str] = frozenset()
    """Options of the task that may change."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """The number of samples of the training data and of each set of the evaluation."""
    earlier: Mapping[str, Any] = field(default_factory=dict)
    """Values of task options in runs that are older than the option (`Task.earlier`)."""
    order: str | None = None
    """The order of the training data, from `order.order_name`; None: not known here."""
    fixed: frozenset[str] = frozenset()
    """Options that may not change because the task's schedulers depend on them."""


def prepare_folder(path: Path, run: Identity, fresh: bool) -> None:
    """Check that a run may use a folder; create it if missing. Changes nothing in a run there.

    Args:
        path: the folder.
        run: the run that wants it.
        fresh: a run there will be moved aside.

    Raises:
        Refusal: it is a file, cannot be written, is not a run's, is another run's, or the run had other data.
    """
    try:
        if path.exists() and not path.is_dir():
            raise Refusal(f"--run-dir {near(path)}: is a file; name a folder")
        if path.is_dir() and not is_run(path) and (foreign := _foreign(path)):
            holds = foreign[0] + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else "")
            raise Refusal(f"--run-dir {near(path)}: is not empty and not a run: it has {holds}; name another folder")
        if not (fresh or is_untrained(path)):
            refuse_another_run(path, run)
        make_folder(path)
        # checks that files can be written and locked here; NFS wants a shared lock's file open to read
        with (path / ".lock").open("a+b") as file:
            if try_lock(file, kind=fcntl.LOCK_SH):
                unlock(file)
    except OSError as error:
        raise Refusal(
            f"--run-dir {near(path)}: cannot be written: {error.strerror or error}; fix that or name another folder"
        ) from None


def refuse_another_run(path: Path, run: Identity) -> None:
    """Refuse options or data that differ from the run there, and checkpoints that cannot be read."""
    folder, config = path / "checkpoints", path / "config.toml"
    # they would count as none, and the run would start over
    if os.path.lexists(folder) and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        gone = folder.is_symlink() and not folder.exists()
        why = f"it is a link to {folder.readlink()}, and nothing is there" if gone else "Permission denied"
        raise Refusal(f"--run-dir {near(path)}: its checkpoints cannot be read: {why}; fix that or name another folder")
    if not config.exists() and step_folders(folder):
        raise Refusal(
            f"--run-dir {near(path)}: has a run without its config.toml, which identifies it; restore that file, "
            "name another folder, or start over with --fresh"
        )
    status, _ = read_facts(path / "status.json")
    before = read_config(config) if config.exists() else run.options
    now = {**run.earlier, **run.options}
    if changed := changed_options({**run.earlier, **before}, now, run.harmless, run.fixed):
        shown = ", ".join(
            f"{flag(name)} was {'unset' if old is None else old} and is now {'unset' if new is None else new}"
            for name, old, new in changed
        )
        more, weights = "", path / "model.pt" if (path / "model.pt").exists() else path
        if any(name in ("epochs", "max_steps") and old and (not new or new > old) for name, old, new in changed):
            more = (
                f"; to train longer, name another folder and add --init-from {weights}: only weights are taken, "
                "since the learning rate depends on the length"
            )
        if not (status.get("step") or step_folders(folder)):
            more = " (it has not finished a step)"
        raise Refusal(
            f"--run-dir {near(path)}: has another run: {shown}; continue it with the old values, name another folder, "
            f"or start over with --fresh{more}"
        )
    refuse_other_data(path, status.get("samples", {}), run.samples)
    if run.order is not None:
        refuse_other_order(path, status, run.order)


def refuse_other_data(path: Path, known: Mapping[str, int], samples: Mapping[str, int]) -> None:
    """Refuse if the number of samples has changed, by part of the data; not all need be known."""
    for part, now in samples.items():
        if (before := known.get(part, now)) != now:
            raise Refusal(
                f"--run-dir {near(path)}: the {part} data had {before} samples and has {now} now, which changes their "
                "order, so that some would come twice; restore the data of the run, name another folder, or start over "
                "with --fresh"
            )


def refuse_other_order(path: Path, known: Mapping[str, Any], order: str) -> None:
    """Refuse if the order of samples has changed. A status that is older than this fact has ""."""
    before = known.get("order", "") if known.get("samples") else order
    if before != order:
        was, now = before or "the usual order", order or "the usual order"
        raise Refusal(
            f"--run-dir {near(path)}: the training data was read in {was} and is read in {now} now, so that some "
            "samples would come twice; restore what it depends on (index and options of the data set, "
            "sample_weights(), order(), sample_lengths()), name another folder, or start over with --fresh"
        )


def move_aside(path: Path) -> Path:
    """Move what a run has written into a new folder beside it, or within it (a mount, another user's folder).

    All of it or nothing. Other files stay, and so do the lock of the job that starts over and what Slurm needs.

    Raises:
        Ended: it cannot be moved; nothing has changed.
    """
    path = path.resolve()  # a link may lead to another file system
    name = f"old-{time.strftime('%Y%m%d-%H%M%S')}"
    entries = [path / ours for ours in ("status.json", *OURS) if os.path.lexists(path / ours)]
    for place in (path.with_name(f"{path.name}.{name}"), path / name):
        aside, moved = None, list[Path]()
        try:
            aside = make_unused(place)
            for entry in entries:
                entry.rename(aside / entry.name)
                moved.append(entry)
                if entry.name == "status.json":
                    # a process that is left of the old run finds another one from here on (`check_not_stale`); and
                    # after a crash here the rest is recognised as a run
                    write_json(entry, {"world_sizes": [], "state": "stopped", "run_id": uuid4().hex})
            return aside
        except OSError as error:
            trouble = error.strerror or str(error)
        if aside:
            for entry in reversed(moved):
                (aside / entry.name).rename(entry)
            aside.rmdir()
    raise Ended(
        f"--fresh: the run in {path} cannot be moved aside: {trouble}; move it away yourself, or name another --run-dir"
    )


def _foreign(path: Path) -> list[str]:
    """Names in a folder without a run that no job leaves there before its run."""

    def ours(entry: Path) -> bool:
        if pattern := BEFORE_A_RUN.get(entry.name):
            return entry.is_dir() and all(re.fullmatch(pattern, inside.name) for inside in entry.iterdir())
        return bool(re.fullmatch(rf"{ASIDE}|\.lock|\.(config\.toml|status\.json)\.\w+\.tmp", entry.name))

    return sorted(entry.name for entry in path.iterdir() if not ours(entry))

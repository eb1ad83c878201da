"""A copy of the code as it was submitted, so that an edit does not change a job in the queue or after a requeue.

``train.py``, the package and the task's file are run from the copy (PYTHONPATH, EVENKEEL_CODE, EVENKEEL_ORIGIN), while
the working directory of the job stays where it was submitted: data and run directories mean the same.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

LARGEST = 10 << 20
"""Bytes. What is larger is data, and not copied."""


def copy_code(origin: Path, copy: Path, task: str) -> str:
    """Copy a checkout: what git tracks, and what it does not ignore; without git all of it but hidden folders.

    Beside it come ``NAME.revision`` and ``NAME.diff``, which say what it was.

    Args:
        origin: the checkout.
        copy: a folder that does not exist.
        task: as --task has it; if its file is outside of the checkout, it goes into ``outside/``.

    Returns:
        the git revision, with "-dirty" if files had changed; empty without git.
    """
    for name in _files(origin):
        source = origin / name
        if source.is_file() and source.stat().st_size <= LARGEST:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name)
    file = Path(task.rpartition(":")[0])
    if file.suffix == ".py" and not file.resolve().is_relative_to(origin):
        (copy / "outside").mkdir(exist_ok=True)
        shutil.copy2(file, copy / "outside" / file.name)
    revision = (_git(origin, "rev-parse", "HEAD") or "").strip()
    diff = _git(origin, "diff", "HEAD") or ""
    if revision and _git(origin, "status", "--porcelain"):
        revision += "-dirty"
    copy.with_suffix(".revision").write_text(f"{revision or 'no git'}\n")
    copy.with_suffix(".diff").write_text(diff)
    return revision


def _files(origin: Path) -> list[str]:
    listed = _git(origin, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        return [name for name in listed.split("\0") if name]
    found = (path.relative_to(origin) for path in origin.rglob("*"))
    return [str(path) for path in found if path.parts[0] not in ("runs",) and not path.parts[0].startswith(".")]


def _git(origin: Path, *arguments: str) -> str | None:
    """What git says of a checkout; None if it is none, or there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(origin), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None

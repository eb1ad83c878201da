"""A copy of the code as it was submitted, so that an edit does not change a job in the queue or after a requeue.

``train.py``, the package and the task's file are run from the copy (PYTHONPATH, EVENKEEL_CODE, EVENKEEL_ORIGIN), while
the working directory of the job stays where it was submitted: data and run directories mean the same.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

LARGEST = 10 << 20
"""Bytes. What is larger is data, and not copied."""


def copy_code(origin: Path, copy: Path, task: str, leave_out: Sequence[Path] = ()) -> str:
    """Copy a checkout: what git tracks, and what it does not ignore; without git all of it but hidden folders.

    Beside it come ``NAME.revision`` and ``NAME.diff``, which say what it was.

    Args:
        origin: the checkout.
        copy: a folder that does not exist.
        task: as --task has it; if its file is outside of the checkout, it goes into ``outside/``.
        leave_out: folders that are not code, such as the run's own. Other runs are known by what is in them.

    Returns:
        the git revision, with "-dirty" if files had changed; empty without git.
    """
    not_code = [path.resolve() for path in leave_out]
    for name in _files(origin):
        source = origin / name
        if _is_of_a_run(source, origin) or any(source.is_relative_to(folder) for folder in not_code):
            continue
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
    copy.with_suffix(".diff").write_text(diff, errors="surrogateescape")
    return revision


def _files(origin: Path) -> list[str]:
    listed = _git(origin, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        return [name for name in listed.split("\0") if name]
    found = (path.relative_to(origin) for path in origin.rglob("*"))
    return [str(path) for path in found if path.parts[0] not in ("runs",) and not path.parts[0].startswith(".")]


def _is_of_a_run(path: Path, origin: Path) -> bool:
    """Whether a file belongs to what a run or a former submission has left in the checkout."""
    inside = path.relative_to(origin).parents
    copied = re.search(r"(^|/)slurm/\d{8}-\d{6}", str(path.relative_to(origin)))
    return bool(copied) or any((origin / folder / "status.json").exists() for folder in inside)


def _git(origin: Path, *arguments: str) -> str | None:
    """What git says of a checkout; None if it is none, or there is no git."""
    try:
        command = ["git", "-C", str(origin), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None

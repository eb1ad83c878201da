"""A copy of the code as submitted, so that later edits do not change a job in the queue or after a requeue.

``train.py``, the package and the task's file are run from the copy (PYTHONPATH, EVENKEEL_CODE, EVENKEEL_ORIGIN). The
job's working directory is where it was submitted, so relative paths of data and runs stay valid.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

LARGEST = 10 << 20  # bytes; larger files are data, and are not copied


def copy_code(origin: Path, copy: Path, task: str, leave_out: Sequence[Path] = ()) -> str:
    """Copy a checkout: what git tracks or does not ignore; without git, all but hidden folders and ``runs``.

    ``NAME.revision`` and ``NAME.diff`` beside the copy identify it.

    Args:
        origin: the checkout.
        copy: a folder that does not exist.
        task: the value of --task; a file outside of the checkout goes into ``outside/``.
        leave_out: folders of this run. Those of other runs are recognised.

    Returns:
        the git revision, with "-dirty" if files had changed; empty without git.
    """
    _copy_files(origin, copy, [path.resolve() for path in leave_out])
    file = Path(task.rpartition(":")[0])
    if file.suffix == ".py" and not file.resolve().is_relative_to(origin):
        (copy / "outside").mkdir(exist_ok=True)
        shutil.copy2(file, copy / "outside" / file.name)
    revision = (_git(origin, "rev-parse", "HEAD") or "").strip()
    if revision and _git(origin, "status", "--porcelain"):
        revision += "-dirty"
    copy.with_suffix(".revision").write_text(f"{revision or 'no git'}\n")
    copy.with_suffix(".diff").write_text(_git(origin, "diff", "HEAD") or "", errors="surrogateescape")
    return revision


def _copy_files(origin: Path, copy: Path, not_code: Sequence[Path], by_link: bool = False) -> None:
    """Copy what is listed. git lists a submodule, another repository and a link to a folder as one name each."""
    for name in _names(origin):
        source, target = origin / name, copy / name
        of_this_run = any((origin.resolve() / name).is_relative_to(folder) for folder in not_code)
        if source == origin or of_this_run or _is_of_a_run(origin, name):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file() and source.stat().st_size <= LARGEST:
            shutil.copy2(source, target)
        elif source.is_symlink() and source.is_dir() and (by_link or not _git(source, "ls-files")):
            target.symlink_to(source.resolve())  # to data, or in a linked folder, where links may form a circle
        elif source.is_dir():
            _copy_files(source, target, not_code, by_link or source.is_symlink())


def _names(origin: Path) -> list[str]:
    listed = _git(origin, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        return list(filter(None, listed.split("\0")))
    found = [path.relative_to(origin) for path in origin.rglob("*") if path.is_symlink() or not path.is_dir()]
    return [str(path) for path in found if not path.parts[0].startswith(".") and path.parts[0] != "runs"]


def _is_of_a_run(origin: Path, name: str) -> bool:
    """Whether a run or an earlier submission left this file in the checkout."""
    copied = re.search(r"(^|/)slurm/\d{8}-\d{6}", name)
    return bool(copied) or any((origin / folder / "status.json").exists() for folder in Path(name).parents)


def _git(origin: Path, *arguments: str) -> str | None:
    """What git prints; None without git or a repository."""
    try:
        command = ["git", "-C", str(origin), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None

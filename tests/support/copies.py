"""Copies of the template, as a stranger has them, and what can be taken out of them."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

from tests.support.processes import ROOT, run


def copy_of_the_template(to: Path) -> Path:
    """All files that git tracks or would track, committed in a repository of its own."""
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"])
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for command in (["init", "-q"], ["add", "--force", "."], ["commit", "-q", "--no-verify", "-m", "A copy"]):
        run(["git", "-c", "user.name=Nobody", "-c", "user.email=nobody@localhost", *command], cwd=to)
    return to


def rooms() -> dict[str, str]:
    """What tools/make_it_yours.py can take out: the files and folders of each room."""
    found: dict[str, str] = runpy.run_path(str(ROOT / "tools" / "make_it_yours.py"))["ROOMS"]
    return found

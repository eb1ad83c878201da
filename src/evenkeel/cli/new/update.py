"""`evenkeel update`: what a newer version would write otherwise into a project, as a diff that `git apply` takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from ... import __version__
from ...common.display import say
from ...common.files import write_atomically
from ...config import Flag
from .project import RECORD, read_record, record_of, render


@dataclass(frozen=True)
class UpdateCommand:
    """Print what a newer evenkeel changes in the files of `new`.

    Example: evenkeel update | git apply

    It prints a diff and overwrites nothing.
    """

    done: Flag = False
    """Record that you have taken the changes over, or do not want them; print nothing more of them from now on."""

    def __call__(self) -> int:
        """Print the diff to stdout, and what the user has touched to stderr."""
        here = Path()
        answers, version, old = read_record(here)
        new = render(answers)
        if self.done:
            text = record_of(answers, __version__, new)
            write_atomically(here / RECORD, lambda file: file.write(text.encode()))
            say(f"evenkeel: recorded in {RECORD}: this project is up to date with {__version__}", to_stderr=True)
            return 0
        text, notes = changes(here, old, new)
        sys.stdout.write(text)  # as it is, for git
        say(f"evenkeel: {version} to {__version__}: {notes or 'nothing has changed'}", to_stderr=True)
        return 0


def changes(folder: Path, old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, str]:
    """The diff from what was written once to what would be written now, and a line about what the user has changed.

    It leaves out files that the user has deleted, and those that already are as they would be written.
    """
    found: dict[str, list[str]] = {"you have not changed": [], "you have changed": [], "you have deleted, left out": []}
    diff = ""
    for path in sorted(path for path in {**old, **new} if old.get(path) != new.get(path)):
        before, after = old.get(path), new.get(path)
        try:
            now = (folder / path).read_text(errors="surrogateescape")
        except OSError:
            now = None
        if now == after:
            continue
        state = "you have deleted, left out" if now is None and before else "you have changed"
        found["you have not changed" if now == before else state].append(path)
        if (now is None) == (before is None):  # else there is nothing to change, or a file in the way
            diff += _diff(_prefix(folder) + path, before, after)
    return diff, "; ".join(f"{state}: {', '.join(paths)}" for state, paths in found.items() if paths)


def _prefix(folder: Path) -> str:
    """The folder's path in its repository, with a slash: `git apply` passes over a diff whose names lack it."""
    command = ["git", "-C", str(folder), "rev-parse", "--show-prefix"]
    with suppress(OSError):  # no git here
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
        return done.stdout.rstrip("\n")
    return ""


def _diff(path: str, before: str | None, after: str | None) -> str:
    """One file of a diff as git writes it; None: there is no file."""
    head = f"diff --git a/{path} b/{path}\n"
    for text, what in ((before, "new"), (after, "deleted")):
        if text is None:
            head += f"{what} file mode {'100755' if (before or after or '').startswith('#!') else '100644'}\n"
    names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}")
    was, will_be = ((text or "").splitlines(keepends=True) for text in (before, after))
    lines = unified_diff(was, will_be, *names)
    return head + "".join(lines)

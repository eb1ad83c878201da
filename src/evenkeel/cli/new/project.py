"""A thin project: from answers to its files, written all or none, with a record by which `update` compares later.

A template may have `@name@`, `@class@` (of the task), `@requirement@` and `@wheel@` (for pip), and lines between `@if
PART@` and `@end@`, which stay if the project has that part: slurm, docker, k8s, wheel, git, index, check or nocheck.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...common.errors import Refusal
from ...common.package_name import why_not

TEMPLATES = Path(__file__).with_name("templates")
TESTING = Path(__file__).parents[2] / "testing.py"
"""By which the tests of a project check all promises; it may have been deleted, with `check`."""

RECORD = ".evenkeel.json"
WHEELS = "wheels"
TASKS = {"classify": "Digits", "lm": "Text", "empty": "MyTask"}
"""The class that the template of each task defines."""

PARTS = ("slurm", "docker", "k8s")
"""What --with may add: a folder of this name."""

FILES = (
    "train.py",
    "NAME/task.py",
    "launch/interpreter.py",
    "launch/single_node.py",
    "launch/multi_node.py",
    "slurm/submit.py",
    "docker/Dockerfile",
    "docker/run.py",
    "k8s/submit.py",
    "tests/test_task.py",
    "pyproject.toml",
    "Makefile",
    "README.md",
    ".ci/run",
    ".gitignore",
)
NEEDED = "a package that the project needs"
IN_THE_WAY = {it.stem: f"{it} in the project" for path in FILES for it in (Path(path), *Path(path).parents)} | {
    "evenkeel": NEEDED,
    **{folder: f"{folder}/ in the project" for folder in ("runs", "data", WHEELS)},
}
"""Names of modules and folders that the package must not hide, and what has them."""


@dataclass(frozen=True)
class Answers:
    """What decides the texts of a project; stored in its record."""

    name: str
    task: str
    parts: tuple[str, ...]
    requirement: str
    kind: str


def check(
    name: str, folder: Path, parts: Sequence[str], known: Sequence[str] = (), packages: Iterable[str] = ()
) -> None:
    """Refuse a folder that holds something, a name that a package cannot have, and a part that is not here.

    `known` are folders with installed modules, besides those of this Python, and `packages` what it will install.
    """
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise Refusal(f"{folder}: exists already, and nothing is overwritten; choose another name, or remove it")
    if not folder.absolute().parent.is_dir():
        raise Refusal(f"{folder.parent}: no such folder; make it first")
    if reason := why_not(name, {**dict.fromkeys(packages, NEEDED), **IN_THE_WAY}, known):
        raise Refusal(f"{name}: {reason}")
    for part in parts:
        if not _template(f"{part}/{'run' if part == 'docker' else 'submit'}.py").is_file():
            raise Refusal(f"--with {part}: has been deleted from this copy of Evenkeel")


def _template(path: str, task: str = "", templates: Path = TEMPLATES) -> Path:
    name = f"task-{task}.py" if path == "NAME/task.py" else path.lstrip(".").replace("/", "-")
    return templates / f"{name}.tmpl"


def render(answers: Answers, templates: Path = TEMPLATES) -> dict[str, str]:
    """The texts of a project by their paths in it."""
    there = "check" if TESTING.is_file() else "nocheck"
    parts = {*answers.parts, answers.kind, there}
    values = {
        "name": answers.name,
        "class": TASKS[answers.task],
        "requirement": json.dumps(answers.requirement, ensure_ascii=False),  # a string of JSON is one of TOML
        # its path: by the name alone, pip could choose another package of this name and version from an index
        "wheel": f"{WHEELS}/evenkeel-*.whl " if answers.kind == "wheel" else "",
    }

    def block(match: re.Match[str]) -> str:
        return match[2] if match[1] in parts else ""

    texts = {}
    for path in FILES:
        if path.partition("/")[0] not in PARTS or path.partition("/")[0] in parts:
            text = _template(path, answers.task, templates).read_text()
            text = re.sub(r"^@if (\w+)@\n(.*?)^@end@\n", block, text, flags=re.MULTILINE | re.DOTALL)
            text = re.sub(rf"@({'|'.join(values)})@", lambda it: values[it[1]], text)
            texts[path.replace("NAME", answers.name)] = text
    return texts


def record_of(answers: Answers, version: str, texts: Mapping[str, str]) -> str:
    """The text of the record: a line for each file."""
    about = "what `evenkeel new` wrote; `evenkeel update` compares with it"
    return json.dumps({"about": about, "version": version, **asdict(answers), "files": texts}, indent=0) + "\n"


def write(answers: Answers, version: str, folder: Path, wheel: Path | None = None) -> list[str]:
    """Write a project; returns the paths of its files.

    All is written beside first, and then moved by one rename, so that a failure leaves nothing.

    Raises:
        Refusal: it cannot be written, or something has come into the folder meanwhile.
    """
    texts = render(answers)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.absolute().parent) as temporary:
            made = Path(temporary, "project")
            for path, text in {**texts, RECORD: record_of(answers, version, texts)}.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text)
                if text.startswith("#!"):
                    mode = (made / path).stat().st_mode
                    (made / path).chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it
            if wheel:
                (made / WHEELS).mkdir()
                shutil.copy(wheel, made / WHEELS)
            made.rename(folder)  # a folder that exists must be empty
    except OSError as error:
        raise Refusal(f"{folder}: cannot be written: {error.strerror}; nothing has been written") from None
    return [*texts, RECORD, *([f"{WHEELS}/{wheel.name}"] if wheel else [])]


def next_steps(folder: Path, written: Sequence[str]) -> str:
    """Where the project is, the commands to type, and the file to edit."""
    here = folder.resolve()
    then = "make test\n  make lock   # keeps the versions that were installed\n"
    again = f"; without: {shlex.quote(sys.executable)} launch/single_node.py" if find_spec("torch") else ""
    commands = f"  cd {shlex.quote(str(here))} && make train   # installs about 6 GB{again}\n  {then}"
    return f"wrote {len(written)} files to {here}. Next:\n{commands}Your model goes into {here.name}/task.py."


def read_record(folder: Path) -> tuple[Answers, str, dict[str, str]]:
    """The answers, the version and the texts of a record.

    Raises:
        Refusal: there is none, or it is damaged.
    """
    path = folder / RECORD
    try:
        known: Any = json.loads(path.read_text())
        answers = Answers(**{it: known[it] for it in Answers.__annotations__} | {"parts": tuple(known["parts"])})
        texts = {str(file): str(text) for file, text in known["files"].items()}
        return answers, str(known["version"]), texts
    except FileNotFoundError:
        raise Refusal(f"no {RECORD} here: run this in the folder that `evenkeel new` wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Refusal(f"{path}: is damaged; take it from an earlier commit") from None

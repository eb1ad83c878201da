"""Copies of the template, as a stranger has them, and what can be taken out of them."""

import ast
import importlib.util
import os
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, run


def copy_files(to: Path) -> None:
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"])
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def copy_of_the_template(to: Path) -> Path:
    """The same, committed in a repository of its own."""
    copy_files(to)
    for command in (["init", "-q"], ["add", "--force", "."], ["commit", "-q", "--no-verify", "-m", "A copy"]):
        run(["git", "-c", "user.name=Nobody", "-c", "user.email=nobody@localhost", *command], cwd=to)
    return to


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("make_it_yours", ROOT / "tools" / "make_it_yours.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def components() -> dict[str, str]:
    """What tools/make_it_yours.py can take out: the files and folders of each component."""
    return tool().COMPONENTS


def lacking() -> str:
    """Why the tool cannot be tried here, or nothing."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        return "needs git, and a checkout of it"
    gone = [
        component
        for component, files in components().items()
        if not any(any(ROOT.glob(part)) for part in files.split())
    ]
    return f"this copy has left out {', '.join(gone)}" if gone else ""


needs_all_components = pytest.mark.skipif(bool(lacking()), reason=lacking())


def some_components(count: int, seed: int = 26) -> list[list[str]]:
    """Random choices of components, and before them all, and those with which the tool once failed half-way."""
    draw, names = random.Random(seed), list(components())
    once = [name for name in names if name not in ("plan", "checkpoint")]
    return [names, once, *(draw.sample(names, draw.randint(3, len(names) - 2)) for _ in range(count))]


def how_many(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more"


def pairs_of_components() -> list[list[str]]:
    return [list(pair) for pair in combinations(components(), 2)]


def taken_out(made: Any, files: Mapping[str, str], without: Sequence[str]) -> tuple[set[str], dict[str, str]]:
    """What the tool would delete without these components, and the texts that it would leave."""
    gone = made.goes({component: made.COMPONENTS[component] for component in without}, files)
    return gone, made.edited(files, made.Gone(without, gone, files))


@cache
def imports(text: str) -> set[str]:
    """What the statements of a file import, and not its functions."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    bases = {node: f"{node.module}." if isinstance(node, ast.ImportFrom) else "" for node in nodes}
    names = {base + alias.name for node, base in bases.items() for alias in node.names}
    return names | {base.rstrip(".") for base in bases.values()}


def dangling(left: Mapping[str, str], kept: set[str], gone: set[str]) -> list[str]:
    """What is gone and yet imported, or named by the Makefile, CI, pyproject.toml, a link or a command in Markdown; and
    support files that a test starts by name."""
    folders = {str(folder) for name in kept for folder in Path(name).parents}
    gone = gone | ({str(folder) for name in gone for folder in Path(name).parents} - folders)
    makefile, found = left["Makefile"], []
    targets = {*re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE)}

    def look(name: str, text: str) -> None:
        words = {os.path.normpath(word) for word in re.findall(r"[\w./-]+", text)}
        found.extend(f"{name}: {word}" for word in words & gone if "/" in word or "." in word)
        for command in re.findall(r"(?:-m |^)evenkeel (\w+)", text, re.MULTILINE):
            path = f"src/evenkeel/cli/{'sample' if command == 'sample' else command}"
            if {f"{path}.py", path} & gone:
                found.append(f"{name}: evenkeel {command}")
        made = set(re.findall(r"\bmake ([\w-]+)", text)) - targets
        found.extend(f"{name}: make {target}" for target in made)

    look("Makefile", makefile)
    look(".ci/run", left[".ci/run"])
    folders_of_mypy = re.findall(r'"([^"]*)"', re.findall(r"^files = (.*)", left["pyproject.toml"], re.MULTILINE)[0])
    found += [f"mypy: {word}" for word in folders_of_mypy if word not in folders | kept]
    files = [name.removesuffix(".py").removeprefix("src/") for name in gone if name.endswith(".py")]
    modules = {name.removesuffix("/__init__").replace("/", ".") for name in files}
    support = {Path(name).name for name in gone if name.startswith("tests/support/")}
    for name, text in left.items():
        if name.startswith("tests/") and (lost := support & set(re.findall(r"\w+\.py", text))):
            found.append(f"{name}: needs {', '.join(sorted(lost))}")
        if name.endswith(".py") and not name.startswith("src/"):  # there imports are relative, and mypy checks them
            found += [f"{name}: import of {module}" for module in imports(text) & modules]
        elif name.endswith(".md"):
            for language, block in re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
                if language[:4] in ("", "bash"):
                    look(name, block)
            for target in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text):
                path = os.path.normpath(Path(name).parent / target)
                found += [f"{name}: link to {path}"] if path not in kept | folders else []
    return found

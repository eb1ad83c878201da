"""The map of the source: imports go down only, no circle of modules, and each room keeps within its budget of lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PACKAGE = ROOT / "src" / "evenkeel"
ROOMS = ["common", "config", "data", "distributed", "resilience", "training", "run", "tasks", "launch", "cli"]
"""From the bottom to the top; a room imports from itself and from those before it."""

BUDGET = {
    "common": 1310,
    "config": 430,
    "data": 2620,
    "distributed": 1970,
    "resilience": 1520,
    "training": 3750,
    "run": 4140,
    "tasks": 2220,
    "launch": 2200,
    "cli": 5150,
}
"""Lines of a room. Growth is a decision: whoever needs more raises it in the same commit, and says why."""


def modules() -> dict[str, Path]:
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__").removesuffix("__init__"): path for name, path in names.items()}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of Evenkeel that a module imports, anywhere in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            assert not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("evenkeel")), (
                f"{path}: relative"
            )
            continue
        parts = package.split(".") if package else []
        base = [*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])]
        for alias in node.names:
            full = ".".join([*base, alias.name])
            found.add(full if full in known else ".".join(base))
    return found - {""}


def room(name: str) -> str:
    return name.partition(".")[0]


def test_imports_go_down_only() -> None:
    known = modules()
    upward = [
        f"{name} imports {other}"
        for name, path in known.items()
        if room(name) in ROOMS
        for other in imports(name, path, known)
        if ROOMS.index(room(other)) > ROOMS.index(room(name))
    ]
    assert not upward
    assert {room(name) for name in known} - {"", "__main__", "moved", "testing"} == set(ROOMS), "testing is above all"


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    # what is exported is imported when it is asked for
    left = {name: imports(name, path, known) for name, path in known.items() if name}
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, "these wait for each other"


def test_the_control_a_circle_and_an_upward_import_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from ..run import b\n")
    known = {"data.a": tmp_path / "a.py", "run.b": tmp_path / "b.py"}
    assert imports("data.a", tmp_path / "a.py", known) == {"run.b"}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_keeps_within_its_budget(name: str) -> None:
    files = [PACKAGE / f"{name}.py"] if name == "config" else [*(PACKAGE / name).rglob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= BUDGET[name], f"{name} has {lines} lines"


def test_every_room_says_what_is_in_it() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        missing = [path.stem for path in folder.glob("*.py") if path.stem != "__init__" and path.stem not in text]
        assert not missing, f"{folder.name}/__init__.py does not tell of {', '.join(missing)}"

"""The map of the source: imports go down only, modules form no circle, components are within their budgets of lines."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PACKAGE = ROOT / "src" / "evenkeel"
COMPONENTS = ["common", "config", "data", "distributed", "resilience", "training", "run", "tasks"]
COMPONENTS += ["mirror"] * (PACKAGE / "mirror").is_dir()  # a copy may leave it out
COMPONENTS += ["launch", "cli"]
COMPONENTS += ["time_travel"] * (PACKAGE / "time_travel").is_dir()  # a copy may leave it out
"""From the bottom to the top; a component imports from itself and from those before it."""

BUDGET = {
    "common": 2023,
    "config": 601,
    "data": 3204,
    "distributed": 2655,
    "resilience": 2036,
    "training": 6979,
    "run": 7814,
    "tasks": 2344,
    "mirror": 726,
    "launch": 3183,
    "cli": 7546,
    "time_travel": 1691,
}
"""Lines of a component. Growth is a decision: whoever needs more raises it in the same commit, and says why."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_METHODS = 400, 50, 15
"""Of a file; of a function; public ones of a class."""

MOST_LINES_TO_READ = 6500
"""Of the files that carry the promises, all together (docs/design.md, "The reading path")."""


def modules() -> dict[str, Path]:
    names = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__").removesuffix("__init__"): path for name, path in names.items()}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of Evenkeel that a module imports, anywhere in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            absolute = isinstance(node, ast.ImportFrom) and str(node.module).startswith("evenkeel")
            assert not absolute, f"{path}: relative"
            continue
        parts = package.split(".") if package else []
        base = [*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])]
        for alias in node.names:
            full = ".".join([*base, alias.name])
            found.add(full if full in known else ".".join(base))
    return found - {""}


def component(name: str) -> str:
    return name.partition(".")[0]


@cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of Evenkeel that it imports."""
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def test_imports_go_down_only() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in graph().items()
        if component(name) in COMPONENTS
        for other in others
        if COMPONENTS.index(component(other)) > COMPONENTS.index(component(name))
    ]
    assert not upward
    known = {component(name) for name in graph()}
    assert known - {"", "__main__", "testing"} == set(COMPONENTS), "testing is above all"


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = {name: others for name, others in graph().items() if name}  # what is exported is imported when asked for
    while ready := [name for name, others in left.items() if not others & left.keys()]:
        for name in ready:
            del left[name]
    assert not left, "these wait for each other"


def test_the_control_a_circle_and_an_upward_import_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from ..run import b\n")
    known = {"data.a": tmp_path / "a.py", "run.b": tmp_path / "b.py"}
    assert imports("data.a", tmp_path / "a.py", known) == {"run.b"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_is_within_its_budget(name: str) -> None:
    files = (PACKAGE / name).rglob("*.py")
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= BUDGET[name], f"{name} has {lines} lines"


def too_large(text: str) -> list[str]:
    """What is beyond the limits in a file: its lines, the lines of a function, the public methods of a class."""
    found = [f"{lines} lines"] if (lines := len(text.splitlines())) > MOST_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            lines = node.end_lineno - node.lineno + 1
            found += [f"{node.name}: {lines} lines"] if lines > MOST_LINES_OF_A_FUNCTION else []
        elif isinstance(node, ast.ClassDef):
            methods = [it for it in node.body if isinstance(it, ast.FunctionDef) and not it.name.startswith("_")]
            found += [f"{node.name}: {len(methods)} public methods"] if len(methods) > MOST_METHODS else []
    return found


def test_files_functions_and_classes_keep_within_their_limits() -> None:
    found = {str(path.relative_to(PACKAGE)): too_large(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {name: what for name, what in found.items() if what}


def test_the_control_what_is_too_large_is_found() -> None:
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(16))
    function = "def f():\n" + "    pass\n" * 50
    assert too_large(f"class C:\n{methods}{function}") == ["C: 16 public methods", "f: 51 lines"]
    assert too_large("x = 1\n" * 401) == ["401 lines"]
    assert too_large("x = 1\n" * 400 + "") == []


def reading_path(text: str) -> list[tuple[Path, int, int]]:
    """The files that the tables in docs/design.md name, how many lines these say they have, and how many they have."""
    _, _, section = text.partition("## The reading path")
    row = r"^\| \d+ \| \[`[^`]+`\]\(\.\./([^)]+)\) \| (\d+) \|"
    rows = re.findall(row, section.partition("\n## ")[0], re.MULTILINE)
    return [(ROOT / file, int(said), len((ROOT / file).read_text().splitlines())) for file, said in rows]


def test_the_reading_path_is_short_and_its_files_are_there() -> None:
    path = reading_path((ROOT / "docs" / "design.md").read_text())
    assert len({file for file, *_ in path}) == len(path) > 30
    assert sum(lines for *_, lines in path) <= MOST_LINES_TO_READ
    assert not [(file.name, said, lines) for file, said, lines in path if abs(said - lines) > 20], "docs/design.md"
    order = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file, *_ in path[1:]]
    later = {name for at, name in enumerate(order) if graph()[name] & set(order[at:])}
    assert later == {"run.run"}, "above what it imports, and docs/design.md names only 2"


def test_every_room_says_what_is_in_it() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        missing = [path.stem for path in folder.glob("*.py") if path.stem != "__init__" and path.stem not in text]
        assert not missing, f"{folder.name}/__init__.py does not tell of {', '.join(missing)}"

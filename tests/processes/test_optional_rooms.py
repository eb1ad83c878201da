"""Rooms are deleted with their tests: the rest lints, its fast tests pass, and it trains and continues.

Not every set of rooms has to be tried. A test file is deleted with any room that it imports. So among all copies that
still have it there is a smallest one, which has only those rooms. Every fast test is run in that one; what passes
without a room may be expected to pass with it, and the random sets try that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import KINDS
from tests.support.copies import (
    copy_of_the_template,
    dangling,
    how_many,
    needs_all_rooms,
    pairs_of_rooms,
    rooms,
    some_rooms,
    taken_out,
    tool,
)
from tests.support.processes import checked, finish, fork, read, run

pytestmark = needs_all_rooms

SMALL = ["--batch-size", 16, "--limit-batches", 4, "--wandb", "disabled", "--schedule", "constant", "--run-dir", "run"]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--assert=plain"]
LIMIT = 1800.0
"""Seconds for all fast tests of a copy, on a machine that has much else to do."""


def copy_without(names: Iterable[str], to: Path, package: str = "evenkeel") -> Path:
    copy = copy_of_the_template(to)
    python(copy, "tools/make_it_yours.py", package, "--without", *names)
    return copy


def python(copy: Path, *arguments: object) -> None:
    """Run Python in a copy; must end well."""
    run([sys.executable, *map(str, arguments)], cwd=copy, env={"PYTHONPATH": str(copy / "src")}, limit=LIMIT)


def lint(copy: Path, cache: Path) -> None:
    """As `make lint`; mypy remembers from copy to copy what has not changed."""
    python(copy, "-m", "ruff", "check", "--no-cache", ".")
    python(copy, "-m", "ruff", "format", "--no-cache", "--check", ".")
    python(copy, "-m", "mypy", "--cache-dir", cache)
    run(["bash", "-n", ".ci/run"], cwd=copy)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("room", rooms())
def test_without(room: str, tmp_path: Path) -> None:
    copy = copy_without([room], tmp_path / "copy")
    assert not [part for part in rooms()[room].split() if [*copy.glob(f"{part}/*"), *copy.glob(part)]]
    for steps in (2, 3):
        started = fork("train.py", *SMALL, "--max-steps", steps, env={"PYTHONPATH": str(copy / "src")}, cwd=copy)
        checked(finish(started), 0)
        assert read(copy / "run")["step"] == steps
    python(copy, *PYTEST, "-k", "test_rooms.py")  # it collects all tests, and runs one file


def test_without_any_two_rooms_nothing_imports_or_names_what_is_gone() -> None:
    made = tool()
    files, names = made.texts(), made.tracked()
    for without in [*pairs_of_rooms(), *some_rooms(20)]:
        gone, left = taken_out(made, files, without)
        assert dangling(left, names - gone, gone) == [], without


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("room", rooms())
def test_the_fast_tests_of_a_room_in_the_smallest_copy_that_has_them(room: str, cache: Path, tmp_path: Path) -> None:
    made = tool()
    files = made.texts()
    with_it = {name: taken_out(made, files, [name])[0] for name in rooms()}
    slow = tuple(f"tests/{folder}/" for folder in KINDS)
    tests = [file for file in sorted(with_it[room]) if "/test_" in file and not file.startswith(slow)]
    kept = {name for name, goes in with_it.items() if goes & set(tests)} | {room}
    copy = copy_without(rooms().keys() - kept, tmp_path / "copy")
    lint(copy, cache)
    if tests:
        python(copy, *PYTEST, *tests)


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("without", some_rooms(5), ids=how_many)
def test_the_fast_tests_of_a_renamed_copy_without_many_rooms(without: list[str], cache: Path, tmp_path: Path) -> None:
    copy = copy_without(without, tmp_path / "copy", "mytrainer")
    python(copy, "-m", "ruff", "check", "--no-cache", "--fix", ".")
    python(copy, "-m", "ruff", "format", "--no-cache", ".")
    lint(copy, cache)
    slow = [f"--ignore=tests/{folder}" for folder in KINDS]
    python(copy, *PYTEST, "-n", 2, *slow)

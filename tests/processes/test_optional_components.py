"""Components are deleted with their tests: the rest lints, its fast tests pass, and it trains and continues.

Not every set of components has to be tried. A test file is deleted with any component that it imports. So among all
copies that still have it there is a smallest one, which has only those components. Every fast test is run in that one;
what passes without a component may be expected to pass with it, and the random sets try that.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import KINDS
from tests.support import copies
from tests.support.processes import checked, finish, fork, read, run

pytestmark = copies.needs_all_components

SMALL = ["--batch-size", 16, "--limit-batches", 4, "--wandb", "disabled", "--schedule", "constant", "--run-dir", "run"]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--assert=plain"]
LIMIT = 1800.0
"""Seconds for all fast tests of a copy, on a machine that has much else to do."""


def copy_without(names: Iterable[str], to: Path, package: str = "evenkeel") -> Path:
    copy = copies.copy_of_the_template(to)
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


@pytest.mark.parametrize("component", copies.components())
def test_without(component: str, tmp_path: Path) -> None:
    copy = copy_without([component], tmp_path / "copy")
    assert not [part for part in copies.components()[component].split() if [*copy.glob(f"{part}/*"), *copy.glob(part)]]
    for steps in (2, 3):
        started = fork("train.py", *SMALL, "--max-steps", steps, env={"PYTHONPATH": str(copy / "src")}, cwd=copy)
        checked(finish(started), 0)
        assert read(copy / "run")["step"] == steps
    python(copy, *PYTEST, "-k", "test_components.py")  # it collects all tests, and runs one file


def test_without_any_two_components_nothing_imports_or_names_what_is_gone() -> None:
    made = copies.tool()
    files, names = made.texts(), made.tracked()
    for without in [*copies.pairs_of_components(), *copies.some_components(20)]:
        gone, left = copies.taken_out(made, files, without)
        assert copies.dangling(left, names - gone, gone) == [], without


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("component", copies.components())
def test_fast_tests_of_a_component_in_the_smallest_copy_with_them(component: str, cache: Path, tmp_path: Path) -> None:
    made = copies.tool()
    files = made.texts()
    with_it = {name: copies.taken_out(made, files, [name])[0] for name in copies.components()}
    slow = tuple(f"tests/{folder}/" for folder in KINDS)
    tests = [file for file in sorted(with_it[component]) if "/test_" in file and not file.startswith(slow)]
    kept = {name for name, goes in with_it.items() if goes & set(tests)} | {component}
    copy = copy_without(copies.components().keys() - kept, tmp_path / "copy")
    lint(copy, cache)
    if tests:
        python(copy, *PYTEST, *tests)


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("without", copies.some_components(5), ids=copies.how_many)
def test_fast_tests_of_a_renamed_copy_without_many_components(without: list[str], cache: Path, tmp_path: Path) -> None:
    copy = copy_without(without, tmp_path / "copy", "mytrainer")
    python(copy, "-m", "ruff", "check", "--no-cache", "--fix", ".")
    python(copy, "-m", "ruff", "format", "--no-cache", ".")
    lint(copy, cache)
    slow = [f"--ignore=tests/{folder}" for folder in KINDS]
    python(copy, *PYTEST, "-n", 2, *slow)

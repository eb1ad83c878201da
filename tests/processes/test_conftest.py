"""Which process runs which tests, with `pytest -n 3 --dist loadfile`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run

NO_SKIPS = {"EVENKEEL_NO_SKIPS": "1"}

TEST = """
import os, pathlib, time

def test_it():
    time.sleep(0.2)
    name = "-".join(pathlib.Path(__file__).parts[-2:])
    pathlib.Path(os.environ["FOUND"], name).write_text(str(os.getpid()))
"""


def processes(folder: Path, *options: str, conftest: bool = True) -> dict[str, set[str]]:
    """The pids of those that ran the tests of each folder of a small project."""
    for name in ("cluster", "docker"):
        (folder / "tests" / name).mkdir(parents=True)
        for test in ("a", "b", "c"):
            (folder / "tests" / name / f"test_{name}_{test}.py").write_text(TEST)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    if conftest:
        copy_conftest(folder)
    found = folder / "found"
    found.mkdir()
    run([sys.executable, "-m", "pytest", "-q", *options], cwd=folder, env={"FOUND": str(found), "PYTEST_ADDOPTS": ""})
    names = {"cluster", "docker"}
    return {name: {path.read_text() for path in found.glob(f"{name}-*")} for name in names}


def copy_conftest(folder: Path) -> None:
    (folder / "tests" / "support").mkdir(parents=True)
    for name in ("conftest.py", "support/needs.py", "__init__.py", "support/__init__.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)


@pytest.mark.parametrize("conftest", [True, False])
def test_a_folder_that_shares_something_stays_in_one_process(tmp_path: Path, conftest: bool) -> None:
    pytest.importorskip("xdist")
    found = processes(tmp_path, "-n", "2", "--dist", "loadfile", conftest=conftest)
    assert all(len(pids) == (1 if conftest else 2) for pids in found.values()), found
    assert len(set().union(*found.values())) == 2


def test_it_works_without_xdist(tmp_path: Path) -> None:
    assert len(set().union(*processes(tmp_path, "-p", "no:xdist").values())) == 1


LACKING = """
import pytest
from tests.support import needs

@needs.tools("a-tool-that-nobody-has")
def test_a_tool(): ...

def test_a_package():
    pytest.importorskip("a_package_that_nobody_has")

@pytest.mark.skipif(True, reason="needs a GPU")
def test_a_gpu(): ...

@pytest.mark.xfail
def test_a_known_failure():
    assert False
"""


@pytest.mark.parametrize(
    ("environment", "ends"), [({}, "3 skipped, 1 xfailed"), (NO_SKIPS, "1 failed, 1 skipped, 1 xfailed, 1 error")]
)
def test_what_is_missing_is_skipped_and_in_ci_an_error(tmp_path: Path, environment: dict[str, str], ends: str) -> None:
    copy_conftest(tmp_path)
    (tmp_path / "tests" / "lacking").mkdir()
    (tmp_path / "tests" / "lacking" / "test_lacking.py").write_text(LACKING)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:xdist"]
    done = run(command, cwd=tmp_path, env={"EVENKEEL_NO_SKIPS": ""} | environment, expect=1 if environment else 0)
    assert ends in done.stdout
    assert "not installed: a-tool-that-nobody-has" in done.stdout

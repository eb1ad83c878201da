"""Which process runs which tests, with `pytest -n 3 --dist loadfile`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run

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
        shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    found = folder / "found"
    found.mkdir()
    run([sys.executable, "-m", "pytest", "-q", *options], cwd=folder, env={"FOUND": str(found), "PYTEST_ADDOPTS": ""})
    names = {"cluster", "docker"}
    return {name: {path.read_text() for path in found.glob(f"{name}-*")} for name in names}


@pytest.mark.parametrize("conftest", [True, False])
def test_a_folder_that_shares_something_stays_in_one_process(tmp_path: Path, conftest: bool) -> None:
    pytest.importorskip("xdist")
    found = processes(tmp_path, "-n", "2", "--dist", "loadfile", conftest=conftest)
    assert all(len(pids) == (1 if conftest else 2) for pids in found.values()), found
    assert len(set().union(*found.values())) == 2


def test_it_works_without_xdist(tmp_path: Path) -> None:
    assert len(set().union(*processes(tmp_path, "-p", "no:xdist").values())) == 1

"""What a machine lacks: a test that needs it is skipped with the reason, and in CI, which has everything, fails."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run

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
    ("no_skips", "ends"), [("", "3 skipped, 1 xfailed"), ("1", "1 failed, 1 skipped, 1 xfailed, 1 error")]
)
def test_what_is_missing_is_skipped_and_in_ci_an_error(tmp_path: Path, no_skips: str, ends: str) -> None:
    for folder in ("support", "lacking"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    for name in ("conftest.py", "support/needs.py", "__init__.py", "support/__init__.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "lacking" / "test_lacking.py").write_text(LACKING)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:xdist"]
    done = run(command, cwd=tmp_path, env={"EVENKEEL_NO_SKIPS": no_skips}, expect=1 if no_skips else 0)
    assert ends in done.stdout
    assert "not installed: a-tool-that-nobody-has" in done.stdout

"""The versions that `make test-versions` runs are those that are promised."""

import re
import sys
from pathlib import Path

import pytest

from evenkeel.run.records import tomllib
from tests import versions
from tests.versions import LOCK, ROOT, VERSIONS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLASSIFIED = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]


def test_the_oldest_is_what_pyproject_allows_and_its_classifiers_are_what_is_run() -> None:
    oldest = VERSIONS["oldest"]
    assert PROJECT["requires-python"] == f">={oldest.pythons[0]}"
    for name in ("torch", "torchvision"):
        assert f"{name}>={getattr(oldest, name)}" in PROJECT["dependencies"]
    assert {version.pythons[0] for version in VERSIONS.values()} <= set(CLASSIFIED)


def test_another_torch_is_installed_beside_the_locked_rest(tmp_path: Path) -> None:
    def names(file: Path) -> set[str]:
        return {line.partition("==")[0] for line in file.read_text().splitlines()}

    made = versions.constraints(VERSIONS["oldest"], tmp_path / "constraints")
    assert {"torch==2.8.*", "torchvision==0.23.*"} < set(made.read_text().splitlines())
    assert names(LOCK) - names(made) >= {"triton", "setuptools"}
    assert {name for name in names(LOCK) - names(made) if re.match("torch|numpy|rich", name)} == set()
    assert versions.constraints(VERSIONS["newest"], tmp_path / "none") == LOCK


def test_a_version_whose_python_is_not_here_is_left_out_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python3.10").write_text("#!/bin/sh\necho 'pyenv: python3.10: command not found' >&2\nexit 127\n")
    (tmp_path / "python3.10").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions.interpreter("3.10") == ""
    monkeypatch.setattr(sys, "argv", ["versions.py", "--only", "oldest"])
    assert versions.main() == 1, "nothing was run"
    assert capsys.readouterr().out.startswith("left out oldest: no python3.10 with venv here\n")

"""The old names of modules."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from evenkeel.moved import MOVED


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("old", MOVED)
def test_a_module_by_its_old_name_is_the_same_module(old: str) -> None:
    pytest.importorskip(f"evenkeel.{MOVED[old]}")  # of a room that may be gone
    module = importlib.import_module(f"evenkeel.{old}")
    assert module is importlib.import_module(f"evenkeel.{MOVED[old]}")
    assert module.__spec__
    assert module.__spec__.name == f"evenkeel.{MOVED[old]}"


def test_an_old_name_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "evenkeel.heartbeat"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("evenkeel: ")

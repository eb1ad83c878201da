"""Each optional room is deleted with its tests: the rest trains, continues, and its tests can be collected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.copies import copy_of_the_template, rooms
from tests.support.processes import read, run

SMALL = [
    "--batch-size",
    "16",
    "--limit-batches",
    "4",
    "--wandb",
    "disabled",
    "--schedule",
    "constant",
    "--run-dir",
    "run",
]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


@pytest.mark.parametrize("room", rooms())
def test_without(room: str, tmp_path: Path) -> None:
    copy = copy_of_the_template(tmp_path / "copy")
    own = {"PYTHONPATH": str(copy / "src")}
    run([sys.executable, "tools/make_it_yours.py", "evenkeel", "--without", room], cwd=copy)
    assert not [part for part in rooms()[room].split() if [*copy.glob(f"{part}/*"), *copy.glob(part)]]
    for steps in ("2", "3"):
        run([sys.executable, "train.py", *SMALL, "--max-steps", steps], cwd=copy, env=own)
        assert read(copy / "run")["step"] == int(steps)
    run([*PYTEST, "--collect-only"], cwd=copy, env=own)
    run([*PYTEST, "tests/test_rooms.py"], cwd=copy, env=own)

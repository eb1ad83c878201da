"""Each optional room is deleted with its tests: the rest trains, continues, and its tests can be collected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.copies import copy_of_the_template, rooms
from tests.support.processes import checked, finish, fork, read

SMALL = ["--batch-size", 16, "--limit-batches", 4, "--wandb", "disabled", "--schedule", "constant", "--run-dir", "run"]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--assert=plain"]


@pytest.mark.parametrize("room", rooms())
def test_without(room: str, tmp_path: Path) -> None:
    copy = copy_of_the_template(tmp_path / "copy")

    def python(*arguments: object) -> None:
        checked(finish(fork(*arguments, env={"PYTHONPATH": str(copy / "src")}, cwd=copy)), 0)

    python("tools/make_it_yours.py", "evenkeel", "--without", room)
    assert not [part for part in rooms()[room].split() if [*copy.glob(f"{part}/*"), *copy.glob(part)]]
    for steps in (2, 3):
        python("train.py", *SMALL, "--max-steps", steps)
        assert read(copy / "run")["step"] == steps
    python(*PYTEST, "-k", "test_rooms.py")  # it collects all tests, and runs one file

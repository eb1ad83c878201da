"""tools/make_it_yours.py: a copy by another name and without the optional rooms trains, continues and passes tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.copies import copy_of_the_template, rooms
from tests.support.processes import TRAIN, read, records, run, torchrun

SMALL = ["--batch-size", 16, "--limit-batches", 4, "--log-every", 1, "--wandb", "disabled", "--schedule", "constant"]


def make_it_yours(copy: Path, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(copy / "tools" / "make_it_yours.py"), *arguments], cwd=copy, expect=expect)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_of_the_template(tmp_path / "copy")


def test_a_renamed_copy_without_optional_rooms(copy: Path, tmp_path: Path) -> None:
    run_dir = ["--run-dir", tmp_path / "run"]
    run(torchrun(2, TRAIN, *SMALL, *run_dir, "--max-steps", 2))  # begun under the old name
    without = ["slurm", "docker", "chaos", "examples", "segment", "regress", "benchmarks"]
    said = make_it_yours(copy, "mytrainer", "--without", *without).stdout
    assert "renamed evenkeel to mytrainer in " in said
    assert all(f"took out {room}: " in said for room in without)
    left = processes.run(["git", "grep", "-l", "evenkeel", "--", ":!tests/fixtures"], cwd=copy, expect=None)
    assert left.stdout == ""

    own = {"PYTHONPATH": str(copy / "src")}
    run(torchrun(2, copy / "train.py", *SMALL, *run_dir, "--max-steps", 3), cwd=copy, env=own)
    assert read(tmp_path / "run")["step"] == 3
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [1, 2, 3]
    done = run(["git", "grep", "-c", "mytrainer", "train.py"], cwd=copy)
    assert done.stdout == "train.py:3\n"
    plan = run([sys.executable, "-m", "mytrainer", "plan", "--help"], cwd=copy, env=own)
    assert plan.stdout.startswith("usage: python -m mytrainer plan ")
    for words in ("check --fix -q", "format -q", "check"):  # as `make format lint` does
        run([sys.executable, "-m", "ruff", *words.split(), "."], cwd=copy)
    tests = ["tests/common", "tests/data/test_plan.py"]
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=copy, env=own)


def test_what_cannot_be_undone_or_imported_is_refused(copy: Path) -> None:
    def refusal(*arguments: str) -> str:
        done = make_it_yours(copy, *arguments, expect=2)
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        return line.removeprefix("make_it_yours: ")

    assert refusal("my-trainer") == "my-trainer: is no name of a package; use letters, digits and _, as in mytrainer"
    assert refusal("class").startswith("class: is no name of a package")
    assert refusal("torch") == "torch: there is a module of this name already; choose another"
    assert refusal("mine", "--without", "tests") == f"--without tests: unknown; choose from {', '.join(rooms())}"
    (copy / "new.py").touch()
    assert refusal("mytrainer") == "git status names 1 changed or new files; commit them, so that this can be undone"
    assert (copy / "src" / "evenkeel" / "cli" / "plan.py").exists()

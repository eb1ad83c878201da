"""tools/make_it_yours.py: a copy by another name and without optional components trains, continues and passes its
tests; a failure changes nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.copies import components, copy_of_the_template, needs_all_components, some_components
from tests.support.processes import TRAIN, finish, read, records, run, start, torchrun

pytestmark = needs_all_components

SMALL = ["--batch-size", 16, "--limit-batches", 4, "--log-every", 1, "--wandb", "disabled", "--schedule", "constant"]


def command(copy: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(copy / "tools" / "make_it_yours.py"), *arguments]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_of_the_template(tmp_path / "copy")


def state(copy: Path) -> dict[str, tuple[int, bytes]]:
    """All files of a copy with their modes and contents, but not git's own."""
    files = [path for path in copy.rglob("*") if path.is_file() and copy / ".git" not in path.parents]
    return {str(path.relative_to(copy)): (path.stat().st_mode, path.read_bytes()) for path in files}


def test_a_renamed_copy_without_most_components(copy: Path, tmp_path: Path) -> None:
    run_dir = ["--run-dir", tmp_path / "run"]
    run(torchrun(2, TRAIN, *SMALL, *run_dir, "--max-steps", 2))  # begun under the old name
    without = some_components(0)[1]
    left_by_python = copy / "src" / "evenkeel" / "cli" / "chaos" / "__pycache__"
    left_by_python.mkdir()
    said = run(command(copy, "mytrainer", "--without", *without), cwd=copy).stdout
    assert f"removed {', '.join(without)}: " in said
    assert "renamed evenkeel to mytrainer" in said
    assert not (copy / "src" / "evenkeel").exists(), "or it would be a package still"
    run(["git", "grep", "-l", "evenkeel", "--", ":!tests/fixtures"], cwd=copy, expect=1)  # nowhere

    own = {"PYTHONPATH": str(copy / "src")}
    run(torchrun(2, copy / "train.py", *SMALL, *run_dir, "--max-steps", 3), cwd=copy, env=own)
    assert read(tmp_path / "run")["step"] == 3
    assert [record["step"] for record in records(tmp_path / "run", "train")] == [1, 2, 3]
    run(["git", "grep", "-q", "mytrainer", "train.py"], cwd=copy)
    plan = run([sys.executable, "-m", "mytrainer", "plan", "--help"], cwd=copy, env=own)
    assert plan.stdout.startswith("usage: python -m mytrainer plan ")
    for words in ("check --fix -q", "format -q", "check"):  # as `make format lint` does
        run([sys.executable, "-m", "ruff", *words.split(), "."], cwd=copy)
    tests = ["tests/common", "tests/data/test_plan.py", "tests/test_main.py", "tests/test_components.py"]
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=copy, env=own)


def test_another_name_after_the_first(copy: Path) -> None:
    run(command(copy, "mytrainer"), cwd=copy)
    run(["git", "-c", "user.name=N", "-c", "user.email=n@localhost", "commit", "-qam", "Mine"], cwd=copy)
    run(command(copy, "ourtrainer", "--without", "docker"), cwd=copy)
    assert (copy / "src" / "ourtrainer" / "cli" / "plan.py").exists()
    assert not (copy / "docker").exists()
    run([sys.executable, "-c", "import ourtrainer"], cwd=copy, env={"PYTHONPATH": str(copy / "src")})


def refusal(copy: Path, *arguments: str) -> str:
    done = run(command(copy, *arguments), cwd=copy, expect=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line.removeprefix("make_it_yours: ")


def test_what_cannot_be_undone_or_imported_is_refused(copy: Path) -> None:
    before = state(copy)
    for name in ("match", "print", "__init__", "torch", "tests", "src", "train"):
        assert refusal(copy, name).startswith(f"{name}: ")
    assert (
        refusal(copy, "mine", "--without", "tests")
        == f"--without tests: unknown; choose from {', '.join(components())}"
    )
    assert state(copy) == before
    (copy / "new.py").touch()
    said = refusal(copy, "mytrainer")
    assert said == "git status names 1 changed or new files; commit them, so that this can be undone"


def test_a_thin_project_cannot_have_the_name_of_a_package_that_it_will_install(copy: Path) -> None:
    """By a Python without packages (-S), as before `make setup`."""
    done = run([sys.executable, "-S", *command(copy, "torch", "--thin")[1:]], cwd=copy, expect=2)
    assert done.stderr.startswith("make_it_yours: torch: is the name of a package that the project needs")
    assert not (copy.parent / "torch").exists()


def locked(copy: Path) -> None:
    """As another git at work leaves it, or one that was killed."""
    (copy / ".git" / "index.lock").touch()


def in_the_way(copy: Path) -> None:
    with (copy / ".git" / "info" / "exclude").open("a") as file:
        file.write("mytrainer\n")
    (copy / "src" / "mytrainer").touch()


@pytest.mark.parametrize(("trouble", "said"), [(locked, "index.lock"), (in_the_way, "Not a directory")])
def test_a_failure_in_the_middle_changes_nothing(trouble, said: str, copy: Path) -> None:
    trouble(copy)
    before = state(copy)
    line = refusal(copy, "mytrainer", "--without", *components())
    assert said in line
    assert line.endswith("; nothing has been changed")
    assert state(copy) == before
    (copy / ".git" / "index.lock").unlink(missing_ok=True)
    assert run(["git", "status", "--porcelain"], cwd=copy).stdout == ""


@pytest.mark.parametrize("words", [["mytrainer"], ["mytrainer", "--thin"]], ids=["all", "thin"])
def test_a_reader_that_is_gone_changes_nothing(words: list[str], copy: Path) -> None:
    """As after `| head -0`: all is done, and no error is printed."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command(copy, *words), cwd=copy, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    errors = [line for line in done.stderr.splitlines() if "building a wheel" not in line]
    assert (done.returncode, errors) == (0, [])
    assert (copy.parent / "mytrainer" if "--thin" in words else copy / "src" / "mytrainer").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["after", "before"], ids=["while it is written", "while it is moved"])
def test_a_signal_leaves_all_or_nothing_done(number: signal.Signals, moment: str, copy: Path) -> None:
    before = state(copy)
    process: subprocess.Popen[str] = start(command(copy, "mytrainer", "--without", *components()), cwd=copy)
    while not [*copy.glob(f".make_it_yours-*/{moment}")] and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    done = finish(process)
    if done.returncode == 0:
        assert not (copy / "src" / "evenkeel").exists()
        assert "renamed evenkeel to mytrainer" in done.stdout
        assert moment == "before", "a signal while it is written was not heeded"
    else:
        assert done.returncode == 130
        assert done.stderr == "make_it_yours: stopped; nothing has been changed\n"
        assert state(copy) == before
    assert not [*copy.glob(".make_it_yours-*")]

"""The command line: what it understands, and that a refusal is one line, exit code 2, and nothing touched."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from evenkeel.common.processes import REFUSAL, stat
from tests.support.processes import LIMIT, TRAIN, finish, run, start, torchrun, wait_until_gone
from tests.support.refusals import NONSENSE, REFUSER
from tests.tasks.test_command_line import (
    folder,  # noqa: F401  (a fixture)
    once,
    refused,  # noqa: F401  (a fixture)
)


@pytest.mark.parametrize(
    ("refusing", "more", "code"), [("01", [], -REFUSAL), ("1", [], -REFUSAL), ("01", ["--tee=3"], 1)]
)
def test_no_worker_is_left_of_a_refusal_whoever_refuses(
    tmp_path: Path, refusing: str, more: list[str], code: int
) -> None:
    """And its line comes once, also through a torchrun that keeps stderr."""
    (tmp_path / "job.py").write_text(REFUSER)
    (out := tmp_path / "out").mkdir()
    done = run(torchrun(2, *more, tmp_path / "job.py", refusing, restarts=3), env={"OUT": str(out)}, expect=code)
    assert done.stderr.count("evenkeel: no\n") == 1
    assert more or (done.stdout, done.stderr) == ("", "evenkeel: no\n")
    wait_until_gone(once(out), limit=5)


def test_a_refusal_spares_what_the_shell_before_torchrun_has_started(tmp_path: Path) -> None:
    """A monitor, say; it has become a child of torchrun's by `exec`."""
    job = torchrun(2, TRAIN, "--task=nonsense", restarts=3)
    process = start(["sh", "-c", 'sleep 60 > /dev/null 2>&1 & echo $!; exec "$@"', "sh", *job])
    assert process.stdout
    monitor = int(process.stdout.readline())
    assert process.wait(LIMIT) == -REFUSAL
    found = stat(monitor)
    assert found is not None
    assert found.state != "Z"
    assert finish(process).stderr == NONSENSE


def test_real_help(tmp_path: Path) -> None:
    env = {"COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    done = run([sys.executable, str(TRAIN), "--help"], cwd=tmp_path, env=env, expect=0)
    assert "--batch-size INT" in done.stdout
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) < 140
    assert max(map(len, lines)) <= 100
    assert re.findall(r"─ (\w+) options ─", done.stdout) == [
        "run", "data", "model", "optimizer", "precision", "checkpoint", "logging", "reproducibility", "task",
    ]  # fmt: skip


@pytest.mark.parametrize("to", ["2>/dev/full", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_exit_code_of_a_refusal_where_nobody_can_read_it(to: str) -> None:
    run(["sh", "-c", f"{sys.executable} {TRAIN} --epochs -1 {to}"], expect=2)


@pytest.mark.parametrize("closed", ["", "<&-", "2>&-", "<&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream_and_any_path_can_be_printed(closed: str) -> None:
    code = "import evenkeel, os; print(chr(0xdcff), os.open(os.curdir, 0))"
    started = run(["sh", "-c", f"{sys.executable} -c '{code}' {closed}"], env={"PYTHONIOENCODING": "utf-8"})
    assert started.stdout == "\\udcff 3\n"

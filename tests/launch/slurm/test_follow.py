"""`python -m evenkeel follow` of a job where there is no Slurm; with one see tests/cluster/test_follow.py."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from evenkeel.launch.slurm.follow import BACKLOG, Logs
from evenkeel.launch.slurm.jobs import JobRecord, load
from tests.support.processes import LIMIT, run, start
from tests.support.rooms import has
from tests.support.terminal import Terminal

FOLLOW = [sys.executable, "-m", "evenkeel", "follow"]
needs_follow = pytest.mark.skipif(not has("follow"), reason="this copy has left out the command")


NO_SLURM = {"PATH": str(Path(sys.executable).parent)}


def submitted(run_dir: Path, job_id: str = "17") -> JobRecord:
    """Leave the record of a job in a run's folder."""
    folder = run_dir.resolve() / "slurm"
    record = JobRecord(
        job_id=job_id,
        run_dir=str(run_dir.resolve()),
        folder=str(folder),
        log=str(folder / "job.log"),
        nodes="1",
        revision="",
        submitted=time.time(),
    )
    record.save()
    return record


def refusal(*arguments: object) -> str:
    done = run([*FOLLOW, *map(str, arguments)], expect=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line.removeprefix("evenkeel: ")


@needs_follow
def test_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    for text in ("{", '{"job_id": "17"}', "[1]"):
        (tmp_path / "slurm").mkdir(exist_ok=True)
        (tmp_path / "slurm" / "job.json").write_text(text)
        assert refusal(tmp_path).startswith(f"{tmp_path}: its slurm/job.json cannot be read: ")


def test_a_record_is_read_as_it_was_saved(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    record = submitted(tmp_path)
    assert load(tmp_path) == record


@needs_follow
def test_without_an_answer_the_log_is_shown_and_slurm_asked_again_until_ctrl_c(tmp_path: Path) -> None:
    """A controller that is down for a while ends nothing."""
    run_dir = tmp_path / "it's mine"
    record = submitted(run_dir)
    with Terminal([*FOLLOW, str(run_dir)], columns=250, env=NO_SLURM) as terminal:
        terminal.read_until("job 17: Slurm does not answer, and is asked again: squeue: not found")
        Path(record.log).write_bytes(b"one line\nand half of an")
        terminal.read_until("one line\nand half of an")
        with Path(record.log).open("ab") as log:
            log.write(b"other\n")
        terminal.read_until("half of another\n")
        terminal.press_ctrl_c()
        assert terminal.end() == 130
        again = f"python -m evenkeel follow '{tmp_path}/it'\"'\"'s mine'"
        assert terminal.text.endswith(f"job 17: continues; `{again}` follows it again, `scancel 17` ends it\n")
        assert terminal.text.count("does not answer") == 1
        assert "Traceback" not in terminal.text


def test_of_a_long_log_the_end_is_shown(tmp_path: Path) -> None:
    record, out = submitted(tmp_path), io.BytesIO()
    Path(record.log).write_text("".join(f"line {n}\n" for n in range(10_000)))
    logs = Logs(record)
    assert logs.shortened
    logs.copy(out)
    lines = out.getvalue().decode().splitlines()
    assert lines[-1] == "line 9999"
    assert lines == [f"line {n}" for n in range(10_000 - len(lines), 10_000)], "whole lines"
    assert BACKLOG - 10 < len(out.getvalue()) <= BACKLOG
    logs.copy(out)
    assert len(out.getvalue()) <= BACKLOG, "nothing is new"


@needs_follow
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`follow | head` ends at the next line, without a traceback."""
    record = submitted(tmp_path)
    process = start([*FOLLOW, str(tmp_path)], env=NO_SLURM)
    assert process.stdout
    assert process.stderr
    assert "does not answer" in process.stdout.readline()
    process.stdout.close()
    Path(record.log).write_text("a line\n")
    assert process.stderr.read() == ""
    assert process.wait(timeout=LIMIT) == 0


def test_the_errors_of_the_last_start(tmp_path: Path) -> None:
    record = submitted(tmp_path)
    for number in (0, 2, 12):
        record.errors(number).mkdir(parents=True)
    assert record.errors(None) == record.errors(12)

"""`python -m evenkeel follow` of a job where there is no Slurm; with one see tests/cluster/test_follow.py."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from evenkeel.launch.slurm.follow import BACKLOG, Logs
from evenkeel.launch.slurm.jobs import JobRecord, load
from tests.support.components import has
from tests.support.processes import EVENKEEL, LIMIT, evenkeel, start
from tests.support.small_runs import the_line
from tests.support.terminal import Terminal

needs_follow = pytest.mark.skipif(not has("follow"), reason="this copy has left out the command")
NO_SLURM = {"PATH": str(Path(sys.executable).parent)}


def submitted(run_dir: Path) -> JobRecord:
    """Leave the record of a job in a run's folder."""
    folder = run_dir.resolve() / "slurm"
    places = {"run_dir": str(run_dir.resolve()), "folder": str(folder), "log": str(folder / "job.log")}
    record = JobRecord(job_id="17", **places, nodes="1", revision="", submitted=time.time())
    record.save()
    return record


@needs_follow
@pytest.mark.parametrize("text", ["{", '{"job_id": "17"}', "[1]"])
def test_a_record_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text(text)
    line = the_line(evenkeel("follow", tmp_path, expect=2).stderr)
    assert line.startswith(f"{tmp_path}: its slurm/job.json cannot be read: ")


def test_a_record_is_read_as_it_was_saved_and_the_errors_are_of_the_last_start(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    record = submitted(tmp_path)
    assert load(tmp_path) == record
    for number in (0, 2, 12):
        record.errors(number).mkdir(parents=True)
    assert record.errors(None) == record.errors(12)


@needs_follow
def test_without_an_answer_the_log_is_shown_and_slurm_asked_again_until_ctrl_c(tmp_path: Path) -> None:
    """A controller that is down for a while ends nothing."""
    run_dir = tmp_path / "it's mine"
    record = submitted(run_dir)
    with Terminal([*EVENKEEL, "follow", str(run_dir)], columns=250, env=NO_SLURM) as terminal:
        terminal.read_until("job 17: Slurm does not answer, trying again: squeue: not found")
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
    process = start([*EVENKEEL, "follow", tmp_path], env=NO_SLURM)
    assert process.stdout and process.stderr  # noqa: PT018
    assert "does not answer" in process.stdout.readline()
    process.stdout.close()
    Path(record.log).write_text("a line\n")
    assert process.stderr.read() == ""
    assert process.wait(timeout=LIMIT) == 0

"""The report, from records written by hand: what is lost, what is only not logged, how long a recovery takes."""

import json
from pathlib import Path
from typing import Any

from evenkeel.cli.chaos.experiment import seconds_to_step, steps
from evenkeel.cli.chaos.faults import Fault
from evenkeel.cli.chaos.progress import Done, Progress

KILL, TRUNCATE = Fault("kill"), Fault("truncate")


def write(run_dir: Path, *records: tuple[str, int, float]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for kind, step, time in records:
            file.write(json.dumps({"kind": kind, "step": step, "time": time}) + "\n")


def progress_of(run_dir: Path, *records: tuple[str, int, float], status: dict[str, Any] | None = None) -> Progress:
    progress = Progress(run_dir)
    write(run_dir, *records)
    (run_dir / "status.json").write_text(json.dumps(status or {}))
    progress.update()
    return progress


def test_a_step_that_is_done_again_was_lost_and_one_without_a_line_was_not(tmp_path: Path) -> None:
    told = [("start", 0, 0.0), *(("train", step, float(step)) for step in (1, 2, 3, 4))]
    again = [("start", 2, 10.0), ("train", 3, 11.0), ("train", 4, 12.0)]
    untold = [("start", 5, 20.0), ("train", 6, 21.0)]
    progress = progress_of(tmp_path, *told, *again, *untold, status={"step": 6, "total_steps": 9})
    assert dict(steps(progress)) == {"steps done": "6 of 9", "lost, done again": "2", "done, not logged": "1"}


def test_with_a_line_for_ten_steps_a_line_counts_ten(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("log_every = 10\n")
    records = [("start", 0, 0.0), ("train", 10, 1.0), ("start", 5, 2.0), ("train", 10, 3.0), ("train", 20, 4.0)]
    report = dict(steps(progress_of(tmp_path, *records, status={"step": 25})))
    assert report["steps done"] == "25 of 0"
    assert report["lost, done again"] == "1 (of the lines logged each 10 steps)"
    assert report["done, not logged"] == "0 (of the lines logged each 10 steps)"


def test_records_of_an_earlier_time_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, ("start", 0, 0.0), ("train", 1, 1.0), ("train", 2, 2.0))
    progress = progress_of(tmp_path, ("start", 1, 3.0), ("train", 2, 4.0))
    assert [record["time"] for record in progress.records] == [3.0, 4.0]
    report = dict(steps(progress))
    assert (report["steps done"], report["lost, done again"]) == ("2 of 0, 1 of them before", "0")


def test_after_a_kill_only_a_step_of_a_new_attempt_is_a_recovery(tmp_path: Path) -> None:
    """A survivor may still tell of the step in which the other rank died."""
    progress = progress_of(tmp_path, ("start", 0, 0.0), ("train", 1, 1.0), ("train", 2, 10.1))
    done = [Done(KILL, 10.0, 1), Done(TRUNCATE, 10.0, 1)]
    assert seconds_to_step(done, progress) == [10.1 - 10.0], "the truncation disturbed nobody"
    assert not progress.recovered(Done(KILL, 10.0, 1))
    write(tmp_path, ("start", 2, 14.0), ("train", 3, 15.0))
    progress.update()
    assert seconds_to_step(done, progress)[0] == 5.0
    assert progress.recovered(Done(KILL, 10.0, 1))


def test_where_steps_are_rarely_told_the_status_shows_that_one_was_done(tmp_path: Path) -> None:
    progress = progress_of(tmp_path, ("start", 0, 0.0), ("start", 7, 12.0), status={"fruitless": 1, "step": 7})
    assert not progress.recovered(Done(KILL, 10.0, 7))
    (tmp_path / "status.json").write_text(json.dumps({"fruitless": 0, "step": 7}))
    assert progress.recovered(Done(KILL, 10.0, 7))
    assert not progress.recovered(Done(TRUNCATE, 10.0, 7))
    (tmp_path / "status.json").write_text(json.dumps({"fruitless": 0, "step": 8}))
    assert progress.recovered(Done(TRUNCATE, 10.0, 7))

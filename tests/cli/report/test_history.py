"""What a run has left, from real runs whose files were then damaged."""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from evenkeel.cli.report.command import ReportCommand
from evenkeel.cli.report.history import History, differing_options, read_histories, read_history
from evenkeel.cli.report.page import page
from evenkeel.common.errors import Refusal
from tests.support.damage import leave_damaged
from tests.support.reports import copy_of_a_run


def write(run_dir: Path, records: list[dict[str, Any]]) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run_dir


def read(run_dir: Path) -> History:
    return read_history(run_dir, run_dir.name)


def record(kind: str, step: int, time: float, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": time} | facts


def test_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evenkeel.cli.status", None)  # without it the state is as recorded
    history = read(copy_of_a_run(tmp_path / "run"))
    assert (history.state, history.step, history.starts, history.again) == ("finished", 60, 1, 0)
    trained = {f"train/{name}" for name in ("loss", "grad_norm", "lr", "samples_per_s")}
    assert history.curves.keys() == trained | {"test/loss", "test/accuracy"}
    (attempt,) = history.attempts
    assert (attempt.ranks, attempt.first_step, attempt.last_step, attempt.ending) == (2, 0, 60, "finished")
    assert attempt.begun < attempt.ready < attempt.until
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert history.best_value()
    assert history.goodput == pytest.approx(summary["goodput"], abs=0.05)


def test_a_truncated_last_line_and_bytes_that_are_no_text_cost_these_lines_only(tmp_path: Path) -> None:
    run_dir = copy_of_a_run(tmp_path / "run")
    whole = read(run_dir)
    file = run_dir / "metrics.jsonl"
    before = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*before[:5], b"\xff\xfe\x00\n", b'{"kind": "train"}\n', *before[5:-1], before[-1][:30]]))
    damaged = read(run_dir)
    assert damaged.curves == whole.curves
    assert [mark for mark in whole.marks if mark not in damaged.marks] == ["finish"]


@pytest.mark.parametrize("status", ["", "[]", '{"state": 3, "world_sizes": "two"}', None])
def test_little_is_left(tmp_path: Path, status: str | None) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(Refusal, match=r"run: no run there .* name a run directory"):
        read(run_dir)
    run_dir.mkdir()
    with pytest.raises(Refusal, match=r"run: no run there .* name a run directory"):
        read(run_dir)
    (run_dir / "config.toml").touch()
    if status is not None:
        (run_dir / "status.json").write_text(status)
    history = read(run_dir)
    assert (history.step, history.starts, history.goodput, history.best_value()) == (0, 0, None, None)


def test_attempts_end_as_they_say_or_were_killed(tmp_path: Path) -> None:
    spent = {"start_up": 2.0}
    records = [record("start", 0, 12.0, world_size=2, spent=spent)]
    records += [record("train", 10, 14.0, loss=3.0, spent=spent | {"productive": 2.0})]  # and then kill -9
    records += [record("start", 5, 20.0, world_size=3, spent=spent)]
    records += [record("train", 10, 21.0, loss=2.0, spent=spent), record("eval", 10, 21.5, **{"validation/auc": 0.5})]
    records += [record("stop", 11, 22.0, reason="SIGTERM", spent=spent)]
    records += [record("start", 11, 30.0, world_size=1, spent=spent), record("failure", 12, 31.0, reason="<b>")]
    records += [record("start", 13, 40.0, world_size=1, spent=spent)]  # the attempt before has saved 13, and logged 12
    left, killed, hung = "rank 0 hung in forward", "rank 1 was killed by SIGKILL", "rank 1 hung and was killed"
    for time, reason, end in ((40.0, "in forward", left), (42.0, "gloo", killed), (44.0, "", left), (46.0, "no", hung)):
        records += [record("failure", 13, time + 1, reason=reason)]
        records += [record("start", 13, time + 2, world_size=1, spent=spent, last_end=end)]
    records += [record("stop", 13, 49.0, reason="the death of another rank")]
    records += [record("start", 13, 50.0, world_size=1, spent=spent, last_end=killed)]
    history = read(write(tmp_path / "run", records))
    found = [(it.ranks, it.first_step, it.last_step, it.ending, it.reason) for it in history.attempts]
    assert found == [
        (2, 0, 10, "killed", ""), (3, 5, 11, "stopped", "SIGTERM"), (1, 11, 13, "failed", "<b>"),
        (1, 13, 13, "failed", "in forward"), (1, 13, 13, "killed", killed), (1, 13, 13, "failed", left),
        (1, 13, 13, "killed", f"{hung}; no"), (1, 13, 13, "killed", killed), (1, 13, 13, "killed", ""),
    ]  # fmt: skip
    assert history.attempts[1].begun == 18.0
    assert history.again == 5
    assert list(history.curves["train/loss"].values) == [2.0], "of a step that was done again the last value counts"
    assert list(history.curves["validation/auc"].steps) == [10]
    assert history.seconds["dead"] == pytest.approx((18 - 14) + (28 - 22) + (38 - 30))


def test_a_step_that_two_later_attempts_begin_before_was_done_again_as_often_as_it_was_computed(tmp_path: Path) -> None:
    records = [record("start", 0, 1.0), record("train", 10, 2.0)]
    records += [record("start", 5, time) for time in (3.0, 4.0, 5.0)]  # two died before a step
    assert read(write(tmp_path / "run", records)).again == 5
    records += [record("train", 8, 6.0), record("start", 5, 7.0), record("train", 11, 8.0)]
    assert read(write(tmp_path / "run", records)).again == 8


def test_a_run_that_has_lost_all_its_steps(tmp_path: Path) -> None:
    records = [record("start", 0, 1.0), record("train", 5, 2.0, loss=1.0), record("start", 0, 3.0)]
    history = read(write(tmp_path / "run", records))
    assert (history.curves, history.again, history.best_value()) == ({}, 5, None)
    assert ReportCommand((tmp_path / "run",))() == 0


def test_numbers_that_no_run_has_written_are_left_out(tmp_path: Path) -> None:
    good = [record("start", 0, 1.0), record("train", 1, 2.0, loss=1.0)]
    bad = [record("train", 10**30, 3.0, loss=1.0), record("train", 2, math.nan, loss=1.0), record("train", -5, 3.0)]
    bad += [record("train", 3, 4.0, loss=10**400, lr=math.inf, grad_norm=math.nan)]
    bad += [record("train", 4, 5.0, loss=None, lr=0.1)]  # as of a loss that is not finite
    memory = {"kind": "memory", "step": 1, "time": 1.0, "memory": [{"weights": 5, "peak": 7}]}
    bad += [memory, *(memory | {"memory": it} for it in ([{"weights": "much"}], 5, [3]))]
    history = read(write(tmp_path / "run", [*good, *bad]))
    assert history.memory == memory["memory"]
    assert {name: list(it.steps) for name, it in history.curves.items()} == {"train/loss": [1], "train/lr": [4]}


def test_runs_are_named_by_their_folders_or_else_by_their_paths(tmp_path: Path) -> None:
    paths = (tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "other")
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        copy_of_a_run(path)
    assert [it.name for it in read_histories(paths)] == [str(paths[0]), str(paths[1]), "other"]


def test_the_options_in_which_runs_differ(tmp_path: Path) -> None:
    histories = [read(copy_of_a_run(tmp_path / name, name)) for name in ("finished", "typed")]
    differing = dict(differing_options(histories))
    assert differing.keys() == {"micro_batch"}
    alone = dict(differing_options(histories[:1]))
    assert alone["batch_size"] == [96]
    assert "log_every" not in alone, "it does not shape the result"
    assert "lr" not in alone, "it is as by default"


def test_random_damage_to_what_a_run_has_written_ends_no_report(tmp_path: Path) -> None:
    """A few of some thousand that were tried, with figures too."""
    run_dir, whole, dice = tmp_path / "run", copy_of_a_run(tmp_path / "whole"), random.Random(1)
    for _ in range(30):
        leave_damaged(run_dir, whole, dice)
        assert page([read(run_dir)], {})


@pytest.mark.parametrize("seconds", [-1e9, -1e300, 1e18, 1e300, math.nan])
def test_durations_that_no_run_has_had_are_left_out(tmp_path: Path, seconds: float) -> None:
    run_dir = copy_of_a_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    write(run_dir, [it | {"spent": {"productive": seconds}} for it in lines[:3]] + lines[3:])
    history = read(run_dir)
    assert 0 <= sum(history.seconds.values()) < 100
    assert "1970" not in page([history], {})

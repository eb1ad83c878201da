"""A tracker of one's own: its calls, its errors, a slow one, and steps that are done again."""

import json
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.run import media, own_trackers
from evenkeel.run.trackers import own_trackers as openers_of
from evenkeel.run.tracking import Tracker
from tests.support import note_tracker
from tests.support.processes import ROOT
from tests.support.raised import refusal_of

PLAN = Plan(samples=100, global_batch=10, micro_batch=5, epochs=2)
MODULE = "tests.support.note_tracker"
NOTES = f"{MODULE}:Notes"


def tracker(folder: Path, start: int, *names: str) -> Tracker:
    made = Tracker(Config(wandb="disabled"), PLAN, folder, 1, 1)
    for name, make in openers_of(names).items():
        made.own_trackers[name] = partial(make, "mine", folder, {"batch_size": 10})
    made.start(start)
    return made


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[int]:
    return [note["step"] for note in notes(folder) if "train/loss" in note.get("metrics", {})]


def test_it_is_made_told_and_closed_in_one_thread(tmp_path: Path) -> None:
    ours = tracker(tmp_path, 0, NOTES, NOTES)
    ours.train(1, 1.5, 2.5, 0.1)
    ours.evaluation(1, {"test/accuracy": 0.5})
    media.log(ours, 1, {"red": torch.zeros(3, 2, 5), "lag": 3})
    ours.send(1, {"best/step": 1})
    ours.close()
    made, train, evaluation, lag, red, best, closed = notes(tmp_path)
    assert (made["made"], made["batch_size"]) == ("mine", 10)
    (line,) = [json.loads(it) for it in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"train"' in it]
    assert train["metrics"] == {name: value for name, value in line.items() if name == "epoch" or "/" in name}
    assert evaluation["metrics"] == {"test/accuracy": 0.5}
    assert lag["metrics"] == {"train/lag": 3.0}
    assert red["metrics"] == {"red": str(tmp_path / "media/red/step-00000001.png")}
    assert (best["metrics"], closed["closed"]) == ({"best/step": 1}, "finished")
    assert len({note["thread"] for note in notes(tmp_path)}) == 1


def test_steps_that_are_done_again_are_not_logged_again(tmp_path: Path) -> None:
    def attempt(start: int, *done: int) -> None:
        ours = tracker(tmp_path, start, NOTES)
        for step in done:
            ours.train(step, 10.0 * start + step, 1.0, 0.1)
            if step % 2 == 0:
                ours.evaluation(step, {"validation/accuracy": step / 10})
        ours.close(1)

    attempt(0, 1, 2, 3, 4)
    attempt(2, 3, 4, 5, 6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    losses = [note["metrics"]["train/loss"] for note in notes(tmp_path) if "train/loss" in note.get("metrics", {})]
    assert losses == [1, 2, 3, 4, 25, 26], "the first values stay"
    seen = [it["step"] for it in notes(tmp_path) if "validation/accuracy" in it.get("metrics", {})]
    assert seen == [2, 4, 6]

    shutil.rmtree(tmp_path / "trackers")  # the control
    attempt(4, 5, 6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]


def test_what_it_has_missed_comes_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was off, or too slow, or is new."""
    ours = tracker(tmp_path, 0)
    for step in (1, 2, 3, 4, 5):
        ours.train(step, float("nan") if step == 2 else step / 2, 1.0, 0.1)
    ours.evaluation(3, {"test/accuracy": 0.5})
    ours = tracker(tmp_path, 3, NOTES)  # steps 4 and 5 were lost
    ours.evaluation(3, {"test/accuracy": 0.5})
    ours.train(4, 20.0, 1.0, 0.1)
    ours.close(1)
    given = [(note["step"], note["metrics"]) for note in notes(tmp_path) if "metrics" in note]
    assert [step for step, _ in given] == [1, 2, 3, 3, 4]
    assert [metrics.get("train/loss") for _, metrics in given][::2] == [0.5, 1.5, 20.0]
    assert given[1][1]["train/loss"] != given[1][1]["train/loss"], "nan, as when it was logged"
    assert given[0][1]["epoch"] == 0.1
    assert given[3][1] == {"test/accuracy": 0.5}, "once"
    ours = tracker(tmp_path, 4, NOTES)
    ours.close()
    assert steps(tmp_path) == [1, 2, 3, 4], "the control: it has missed nothing"


@pytest.mark.parametrize("where", ["__init__", "log", "close", "exit"])
def test_an_error_costs_a_line_and_the_others_go_on(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(note_tracker.Broken, "where", where)
    name = f"{MODULE}:Broken"
    ours = tracker(tmp_path, 0, name, NOTES)
    for step in (1, 2, 3):
        ours.train(step, 1.5, 2.5, 0.1)
        time.sleep(0.05)
    ours.close()
    error = "SystemExit: 0" if where == "exit" else "OSError: the server is gone"
    off = "is off" if where == "__init__" else "is off from here on"
    assert caplog.text.count(f"{name} {off}: {error} at {ROOT / 'tests/support/note_tracker.py'}:") == 1
    assert len(caplog.text.splitlines()) == 1
    assert steps(tmp_path) == [1, 2, 3]


def test_a_slow_one_delays_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_trackers, "PATIENCE", 0.2)
    monkeypatch.setattr(note_tracker.Stuck, "answer", threading.Event())
    name = f"{MODULE}:Stuck"
    ours = tracker(tmp_path, 0, name)
    began = time.monotonic()
    for step in range(1, 101):
        ours.train(step, 1.5, 2.5, 0.1)
    took = time.monotonic() - began
    assert took < 5, "and a call takes a minute"
    ours.close(75)
    assert f"{name}: not closed after 0 s, 99 reports are not sent" in caplog.text
    note_tracker.Stuck.answer.set()


def test_one_that_is_far_behind_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_trackers, "MOST_WAITING", 3)
    monkeypatch.setattr(note_tracker.Stuck, "answer", threading.Event())
    ours = tracker(tmp_path, 0, f"{MODULE}:Stuck")
    for step in range(1, 9):
        ours.train(step, 1.5, 2.5, 0.1)
    assert caplog.text.count(f"{MODULE}:Stuck is off from here on: 3 reports wait for it") == 1
    note_tracker.Stuck.answer.set()


def test_a_start_waits_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_trackers, "INIT_TIMEOUT", 0.1)
    monkeypatch.setattr(note_tracker.Stuck, "answer", threading.Event())
    name = f"{MODULE}:StuckStart"
    ours = tracker(tmp_path, 0, name, NOTES)
    ours.train(1, 1.5, 2.5, 0.1)
    note_tracker.Stuck.answer.set()
    ours.close()
    assert steps(tmp_path) == [1]
    assert not caplog.text


def test_a_folder_that_cannot_be_made_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trackers").write_text("in the way")
    ours = tracker(tmp_path, 0, NOTES)
    ours.train(1, 1.5, 2.5, 0.1)
    ours.close()
    assert caplog.text.count(f"{NOTES} is off: FileExistsError: ") == 1


def test_a_copy_without_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evenkeel.run.own_trackers", None)
    assert openers_of([]) == {}
    assert "has been deleted from this copy of Evenkeel; leave it out" in refusal_of(openers_of, [NOTES])


@pytest.mark.parametrize("damage", ["{", '{"train/loss": "x"}', "[]"])
def test_a_damaged_record_of_it_costs_nothing_else(tmp_path: Path, damage: str) -> None:
    tracker(tmp_path, 0, NOTES).close()
    path = tmp_path / "trackers" / "tests.support.note-tracker-Notes.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(damage)
    ours = tracker(tmp_path, 0, NOTES)
    ours.train(1, 1.5, 2.5, 0.1)
    ours.close()
    assert steps(tmp_path) == [1]
    assert json.loads(path.read_text().splitlines()[-1])["train/loss"] == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Notes", "give FILE.py:CLASS or PACKAGE.MODULE:CLASS"),
        ("nowhere.py:Mine", "no file nowhere.py"),
        ("nowhere:Mine", "does not import: ModuleNotFoundError: No module named 'nowhere'"),
        (f"{MODULE}:Other", f"Other does not exist in {MODULE}"),
        (f"{MODULE}:a_function", f"a_function is not a class in {MODULE}"),
        (f"{MODULE}:NoClose", "NoClose must define log(metrics, step) and close(status)"),
        (f"{MODULE}:NoStep", "NoStep must define log(metrics, step) and close(status)"),
        (f"{MODULE}:NoConfig", "is made as NoConfig(name, directory, config); take these three"),
    ],
)
def test_what_is_no_tracker_is_refused(name: str, why: str) -> None:
    assert refusal_of(openers_of, [NOTES, name]) == f"--tracker {name}: {why}"

"""Every second of a run has an account."""

from pathlib import Path

import pytest

from evenkeel.common import phases as activity
from evenkeel.common.phases import COMPUTING, DATA, EVALUATION, Activity
from evenkeel.run.records import ACCOUNTS, attempt_ends, goodput, goodput_to_show, ledger, read_records


class Clock:
    """Stands still, unless it is told how much time goes by: a real sleep is as long as the machine is busy."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(activity, "time", it)
    return it


def test_seconds_go_to_the_account_of_their_phase(clock: Clock) -> None:
    it = Activity()
    for phase, seconds in [(DATA, 0.1), (COMPUTING, 0.2), (DATA, 0.1)]:
        it.enter(phase)
        clock.sleep(seconds)
    with it.during(EVALUATION):
        clock.sleep(0.05)
    assert it.phase == DATA
    spent = it.spent()
    assert (spent["data"], spent["productive"], spent["evaluation"]) == (0.2, 0.2, 0.05)
    assert spent["start_up"] > 0.2, "this process and its imports are older than the test"


def test_work_that_an_earlier_attempt_had_done_is_redone(clock: Clock) -> None:
    it = Activity()
    it.redo_until, it.step = 2, 1
    it.enter(COMPUTING)
    clock.sleep(0.05)
    it.enter(DATA)
    it.step = 2
    it.enter(COMPUTING)
    clock.sleep(0.1)
    assert (it.spent()["redone"], it.spent()["productive"]) == (0.05, 0.1)


def test_a_hang_is_dead_time(clock: Clock) -> None:
    it = Activity()
    it.enter(COMPUTING)
    clock.sleep(0.05)
    it.write_off()
    assert it.spent()["dead"] == 0.05
    assert "productive" not in it.spent()


def test_attempts_add_up_and_the_gaps_are_dead(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"kind": "start", "step": 0, "time": 105.0, "spent": {"start_up": 5.0}}\n'
        '{"kind": "train", "step": 5, "time": 115.0, "spent": {"start_up": 5.0, "productive": 9.0, "data": 1.0}}\n'
        '{"kind": "tr\n'
        '{"kind": "start", "step": 0, "time": 124.0, "spent": {"start_up": 4.0}}\n'
        '{"kind": "train", "step": 5, "time": 130.0, "spent": {"start_up": 4.0, "redone": 2.0, "productive": 4.0}}\n'
    )
    seconds = ledger(read_records(path))
    assert seconds == {
        "productive": 13, "data": 1, "checkpoint": 0, "evaluation": 0, "start_up": 9, "redone": 2, "dead": 5,
    }  # fmt: skip
    assert sum(seconds.values()) == 30
    assert goodput(seconds) == round(13 / 30, 4)
    assert [goodput_to_show(0.5, *it) for it in ((60.0, 2), (59.0, 2), (6000.0, 1))] == [0.5, None, None]
    assert [record["time"] for record in read_records(path, tail=120)] == [130.0]
    assert ledger(read_records(tmp_path / "none")) == dict.fromkeys(ACCOUNTS, 0)
    ends = attempt_ends(path)
    assert [record["time"] for record in ends] == [105.0, 115.0, 124.0, 130.0]
    with path.open("a") as file:  # of an attempt that has died at once, and of one that begins
        file.write('{"kind": "start", "step": 5, "time": 140.0, "spent": {"start_up": 4.0}}\n' * 2)
    assert ledger(attempt_ends(path)) == ledger(read_records(path))
    start = {"kind": "start", "step": 0, "time": 100.0, "spent": {"start_up": 4.0}}
    assert ledger([start, start | {"time": 9000.0}])["dead"] == 0, "there was no training to be down"
    end = {"kind": "stop", "step": 5, "time": 130.0, "spent": {"productive": 9.0}}
    dead = {why: ledger([start, end | {"reason": why}, start | {"time": 9e3}])["dead"] for why in ("SIGINT", "SIGTERM")}
    assert dead == {"SIGINT": 0, "SIGTERM": 8866}, "a pause that somebody wanted is none"

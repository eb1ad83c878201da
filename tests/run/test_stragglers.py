"""Who is late: the criterion on made-up times, and what is said and written. Real ranks: tests/processes."""

import json
import logging
import random
from pathlib import Path

import pytest

from evenkeel.run import stragglers
from evenkeel.run.stragglers import TIMES, Stragglers, late


def row(data: float, forward: float, backward: float, micro_batches: int = 10, samples: int = 40) -> list[float]:
    """Of ten steps."""
    return [data, forward, backward, micro_batches, samples, 10]


EVEN = row(0.1, 1.0, 2.0)


def test_the_late_rank_and_the_part_in_which_it_loses_most() -> None:
    for place, part in enumerate(("data", "forward", "backward")):
        slow = list(EVEN)
        slow[place] += 1.5
        for ranks in (2, 3, 8):
            for rank in range(ranks):
                rows = [slow if r == rank else EVEN for r in range(ranks)]
                assert late(rows) == {rank: (pytest.approx(4.6 / 3.1), part)}


def test_ranks_alike_and_idle_ones_are_not_late() -> None:
    assert late([EVEN] * 4) == {}
    assert late([EVEN, [0.0] * 5 + [10.0]]) == {}, "an idle rank is in time, and the other is alone"
    assert late([[0.0] * 6] * 3) == {}
    slightly = [row(0.1, 1.0 + 0.02 * r, 2.0) for r in range(8)]
    assert late(slightly) == {}


def test_a_spread_among_all_is_nobodys_fault() -> None:
    """Control: by the ratio alone the last one would be named."""
    spread = [row(0.0, seconds, 0.0) for seconds in (0.4, 0.7, 1.0, 1.1, 1.4)]
    assert stragglers.RATIO < 1.4 / 1.0
    assert late(spread) == {}


def test_smaller_micro_batches_make_nobody_late() -> None:
    """Control: by micro-batch rank 0 and 1 would be named, or by sample the last, where 100 samples are cut by 40."""
    rows = [row(0.0, 1.3, 2.6, 10, 400), row(0.0, 1.3, 2.6, 10, 400), row(0.0, 1.0, 1.6, 10, 200)]
    assert stragglers.RATIO * 3.9 / 400 < 2.6 / 200
    assert late(rows) == {}
    assert late(rows[1:]) == {}
    assert set(late([rows[0], row(0.0, 9.0, 2.6, 10, 400), rows[2]])) == {1}


def test_begin_and_end_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stragglers, "SPAN", 0.0)
    caplog.set_level(logging.WARNING)
    it = Stragglers(tmp_path / "ranks.jsonl", ["a", "b", "b"])
    slow = [EVEN, row(0.1, 2.5, 2.0), EVEN]
    for step in range(10, 10 * TIMES, 10):
        it.take(step, slow)
    assert not caplog.messages
    for step in range(10, 51, 10):
        it.take(step, slow)
    (said,) = caplog.messages
    assert said.startswith("rank 1 on b arrives 1.5 times later than the median, in forward (steps ")
    assert list(it.named) == [1]
    for _ in range(3):
        it.take(60, [EVEN] * 3)
    it.take(60, slow)
    assert len(caplog.messages) == 1, "a moment in time does not end it"
    for step in range(70, 70 + 10 * TIMES, 10):
        it.take(step, [EVEN] * 3)
    assert caplog.messages[1].startswith("rank 1 on b is in time again, by step ")
    assert len(caplog.messages) == 2
    assert not it.named
    first, second, *_ = map(json.loads, (tmp_path / "ranks.jsonl").read_text().splitlines())
    facts = {"step": 10, "time": first["time"], "hosts": ["a", "b", "b"], "arrival": [0.31, 0.46, 0.31]}
    waits = {"data_wait": [0.01] * 3, "data": [0.01] * 3}
    assert first == facts | waits | {"forward": [0.1, 0.25, 0.1], "backward": [0.2] * 3}
    assert second.keys() == first.keys() - {"hosts"}


def test_noise_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Control: single spans of the same noise are late again and again."""
    monkeypatch.setattr(stragglers, "SPAN", 0.0)
    dice, found = random.Random(0), 0
    it = Stragglers(tmp_path / "ranks.jsonl", ["a"] * 3)
    for step in range(2000):
        rows = [row(0.1, dice.lognormvariate(0, 0.15), dice.lognormvariate(0, 0.15)) for _ in range(3)]
        found += bool(late(rows))
        it.take(step, rows)
    assert found > 20
    assert not caplog.messages


def test_a_full_disk_costs_a_line(caplog: pytest.LogCaptureFixture) -> None:
    it = Stragglers(Path("/dev/full"), ["a"])
    for step in range(1, 4):
        it.take(step, [EVEN])
    assert caplog.text.count("full: ") == 1

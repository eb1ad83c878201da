"""What is not as a run has written it does not come through."""

import json
import math
from pathlib import Path

import pytest

from evenkeel.common.naming import shown
from evenkeel.run.records import evaluation_in, ledger, read_facts, read_record, read_records, values_of

WHOLE = {"kind": "digest", "step": 3, "time": 1, "digests": {"w": "0"}, "spent": {"productive": 2}, "loss": None}


RUINED = [
    b"",
    b"null",
    b"[]",
    b"7",
    b'{"kind": "tr',
    b"[" * 100_000,
    b"\xff\xfe",
    *(json.dumps({**WHOLE, **change}).encode() for change in (
        {"kind": 1}, {"step": "3"}, {"step": True}, {"time": None}, {"spent": [1]}, {"spent": {"productive": "2"}},
        {"digests": {"w": 0}}, {"differences": {"threads": ["1"]}}, {"world_size": 2.5},
        {"step": -1}, {"step": 2**63}, {"step": math.inf}, {"time": -1}, {"time": math.nan}, {"time": 1e12},
        {"spent": {"productive": -1.0}}, {"spent": {"productive": math.inf}}, {"spent": {"productive": 10**400}},
        {"epoch": math.nan}, {"epoch": "1"}, {"attempt": [1]}, {"world_size": -1},
    )),
]  # fmt: skip


def test_whole_lines_come_through_and_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(WHOLE).encode()
    assert read_record(whole) == WHOLE
    assert [line for line in RUINED if read_record(line) is not None] == []
    path.write_bytes(b"\n".join([whole, *RUINED, whole, b""]))
    assert list(read_records(path)) == [WHOLE, WHOLE] == list(read_records(path))
    (line,) = caplog.messages
    assert line == f"{path}: some of its lines are damaged and are left out"
    assert list(read_records(path, tail=len(whole) + 5)) == [WHOLE]
    assert ledger([WHOLE, {**WHOLE, "spent": {"of a later version": 5.0}}])["productive"] == 0


def test_facts(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_facts(path) == ({}, "")
    path.write_text('{"state": "running", "step": 7, "last_failure": null, "pid": "x", "mine": [1, "x"]}')
    facts = {"state": "running", "step": 7, "mine": [1, "x"]}
    assert read_facts(path) == (facts, "status.json has been changed: pid is 'x'")
    for digests in ([1], {"training": "x"}, {"training": {"equal": "x"}}, {"training": {"equal": "x", "near": ["1"]}}):
        path.write_text(json.dumps({"digests": digests}))
        assert "digests is" in read_facts(path)[1]
    path.write_text('{"digests": {"training": {"equal": "x", "near": [1.5, 0]}}}')
    assert read_facts(path)[1] == ""
    path.write_text("[1]")
    assert read_facts(path) == ({}, "status.json cannot be read: a JSON list and not an object")


def test_values_that_are_no_numbers_count_as_not_finite() -> None:
    values = {"a": math.nan, "b": 10**400, "c": -math.inf, "d": "x", "e": 1, "f": None}
    record = {"kind": "train", "step": 1, "time": 1, **values}
    unknown = dict.fromkeys(("train/a", "train/b", "train/c", "train/f"))
    assert values_of(record) == unknown | {"train/e": 1}
    assert shown(values_of(record)) == "train/a nan  train/b nan  train/c nan  train/e 1.0000  train/f nan"


def test_an_evaluation_counts_if_its_step_and_the_code_are_the_same_since() -> None:
    found = [{"kind": "start", "step": 0}, {"kind": "eval", "step": 3, "test/loss": 0.5}, {"kind": "start", "step": 3}]
    assert evaluation_in(found, 3) == {"test/loss": 0.5}
    for since in ({"kind": "bits", "step": 3}, {"kind": "start", "step": 2}):
        assert evaluation_in([*found, since], 3) == {}

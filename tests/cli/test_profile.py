"""Merging traces: names, clocks, and what is no trace of ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from evenkeel.cli.profile import ProfileCommand, merged
from tests.support.raised import refusal_of


def trace(rank: int, host: str, ahead_ns: int = 0, session: int = 7) -> dict[str, Any]:
    """Of a rank with a GPU, whose only collective begins 100 us after the base time."""
    events = [
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": "GPU 1"}},
        {"ph": "M", "name": "process_labels", "pid": 4711, "tid": 0, "args": {"labels": "CPU"}},
        {"ph": "X", "name": "kernel", "pid": 1, "tid": 7, "ts": 90.0 + ahead_ns / 1e3, "dur": 5.0},
        {"ph": "X", "name": "all_reduce", "pid": 4711, "tid": 1, "ts": 100.0 + ahead_ns / 1e3, "dur": 50.0},
        {"ph": "s", "id": 3, "name": "flow", "pid": 4711, "tid": 1, "ts": 100.0 + ahead_ns / 1e3},
        {"ph": "i", "name": "Iteration Start", "pid": "Traces", "tid": "", "ts": 1.0},
    ]
    facts = {"rank": rank, "world_size": 3, "host": host, "steps": "4:7", "clock_ahead_ns": ahead_ns}
    return {"baseTimeNanoseconds": 10**18, "evenkeel": facts | {"session": session}, "traceEvents": events}


def test_ranks_have_names_of_their_own_and_one_clock() -> None:
    events = merged([trace(0, "a"), trace(1, "b", ahead_ns=3_000_000)])["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    ranks = ["rank 0 (node a)", "rank 1 (node b)"]
    assert list(names.values()) == [ranks[0], f"{ranks[0]} GPU 1", ranks[1], f"{ranks[1]} GPU 1"]
    assert [(names[e["pid"]], e["ts"]) for e in events if e["name"] == "all_reduce"] == [(it, 10.0) for it in ranks]
    assert len({event["id"] for event in events if "id" in event}) == 2, "arrows stay within their rank"


def test_what_is_missing_or_old_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    for rank, session in enumerate((7, 7, 3)):
        (folder / f"rank-{rank}.json").write_text(json.dumps(trace(rank, "ab"[rank % 2], 0, session)))
    assert ProfileCommand(tmp_path)() == 0
    said = capsys.readouterr().out
    assert "ranks 0-1, steps 4:7" in said
    assert "left out: rank-2.json, from another window" in said
    assert "no trace of rank 2" in said


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"evenkeel": 3}', '{"traceEvents": []}'])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    assert "no traces there; make some" in refusal_of(ProfileCommand(tmp_path))
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-0.json").write_text(content)
    assert "not a trace of" in refusal_of(ProfileCommand(tmp_path))
    assert "exists already" in refusal_of(ProfileCommand(tmp_path, tmp_path / "profile" / "rank-0.json"))

"""A metrics.jsonl that grows, is cut, or begins anew."""

import json
from pathlib import Path
from typing import Any

from evenkeel.run.records import Tail


class Steps(Tail):
    """The steps of all records."""

    def reset(self) -> None:
        self.found: list[int] = []

    def take(self, record: dict[str, Any]) -> None:
        self.found.append(record["step"])


def line(step: int) -> str:
    return json.dumps({"kind": "train", "step": step, "time": 1.0}) + "\n"


def test_a_line_is_taken_once_and_when_it_is_whole(tmp_path: Path) -> None:
    steps = Steps(path := tmp_path / "metrics.jsonl")
    steps.update()
    assert steps.found == []
    for text, expected in ((line(1)[:9], []), (line(1)[9:], [1]), ('{"kind": "tr\nnull\n' + line(2), [1, 2])):
        with path.open("a") as file:
            file.write(text)
        steps.update()
        assert steps.found == expected


def test_a_run_that_was_started_over_begins_anew(tmp_path: Path) -> None:
    steps = Steps(path := tmp_path / "metrics.jsonl")
    path.write_text(line(1) + line(2))
    steps.update()
    path.rename(tmp_path / "old")
    path.write_text(line(7) + line(8) + line(9))
    steps.update()
    assert steps.found == [7, 8, 9]

"""`compare --metrics`: last and best metrics of several runs, with what was lost or done again left out."""

import json
from pathlib import Path
from typing import Any

import torch

from evenkeel.cli.compare_metrics import as_json, measured, table
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance
from tests.cli.test_compare import compare


def made_up(folder: Path, *records: dict[str, Any], best: tuple[str, Any] | None = ("test/accuracy", "max")) -> Path:
    """A run with these lines in metrics.jsonl, and a checkpoint that says which metric decides."""
    folder.mkdir()
    (folder / "config.toml").write_text("seed = 0\n")
    lines = [json.dumps({"time": 0.0, **record}) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, "half a li"]))
    state = {"step": 1, "model": {"w": torch.zeros(1)}, "optimizers": []}
    Checkpoints(folder / "checkpoints", 2, Provenance(best)).save(state, {})
    return folder


def train(step: int, loss: float | None) -> dict[str, Any]:
    return {"kind": "train", "step": step, "train/loss": loss, "epoch": 0.5, "spent": {"data": 1.0}}


def evaluation(step: int, accuracy: float, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "test/accuracy": accuracy, "test/loss": loss}


def three(folder: Path) -> list[Path]:
    first = made_up(folder / "a", train(10, 0.5), evaluation(10, 0.75, 0.25), train(20, 0.25), evaluation(20, 0.5))
    second = made_up(folder / "b", train(10, None), evaluation(10, 0.25), {"kind": "log", "step": 10, "train/lag": 3})
    third = made_up(folder / "c", train(10, 1.0), best=None)
    return [first, second, third]


def test_a_line_for_each_metric_with_differences_from_the_first(tmp_path: Path) -> None:
    runs = three(tmp_path)
    lines = compare("--metrics", *runs, expect=0)
    assert [line.split() for line in lines[:-1]] == [
        ["metric", "at", *map(str, runs)],
        ["step", "last", "20", "10", "10"],
        ["step", "best", "10", "10", "-"],
        ["test/accuracy", "last", "0.5", "0.25", "(-0.25)", "-"],
        ["test/accuracy", "best", "0.75", "0.25", "(-0.5)", "-"],
        ["test/loss", "last", "1", "1", "(+0)", "-"],
        ["test/loss", "best", "0.25", "1", "(+0.75)", "-"],
        ["train/loss", "last", "0.25", "nan", "1", "(+0.75)"],
        ["train/lag", "last", "-", "3", "-"],
    ]
    assert lines[-1] == "best: at the step with the highest test/accuracy"
    assert compare(*runs[:2], "--metrics", expect=0)[1].split() == ["step", "last", "20", "10"]


def test_json_has_an_item_for_each_run(tmp_path: Path) -> None:
    runs = three(tmp_path)
    found = json.loads("\n".join(compare("--metrics", "--json", *runs, expect=0)))
    assert found == as_json(runs)
    assert found["best_by"] == ["highest test/accuracy", "highest test/accuracy", None]
    assert (found["steps"], found["best_steps"]) == ([20, 10, 10], [10, 10, None])
    assert found["metrics"]["test/accuracy"]["best"] == {"values": [0.75, 0.25, None], "differences": [0.0, -0.5, None]}
    assert found["metrics"]["train/loss"]["last"] == {"values": [0.25, None, 1.0], "differences": [0.0, None, 0.75]}


def test_what_was_lost_or_done_again_does_not_count(tmp_path: Path) -> None:
    start = {"kind": "start", "step": 10}
    lost = made_up(tmp_path / "lost", evaluation(10, 0.5), evaluation(20, 0.9), train(20, 9.0), start)
    assert (measured(lost).step, measured(lost).best_step) == (10, 10)
    assert measured(lost).last == {"test/accuracy": 0.5, "test/loss": 1.0}
    again = made_up(tmp_path / "again", evaluation(10, 0.5), evaluation(20, 0.9), start, evaluation(20, 0.25))
    assert (measured(again).last["test/accuracy"], measured(again).best_step) == (0.25, 10)
    lowest = made_up(tmp_path / "low", evaluation(10, 0.5), evaluation(20, 0.25), best=("test/accuracy", "min"))
    assert measured(lowest).best_step == 20
    last = "best: at the step with the lowest test/accuracy or the highest test/accuracy"
    assert table([lowest, again])[-1] == last


def test_refusals(tmp_path: Path) -> None:
    runs = three(tmp_path)
    empty = made_up(tmp_path / "empty")
    assert compare(*runs, expect=2) == [f"evenkeel: {runs[2]}: only with --metrics; else two runs are compared"]
    (line,) = compare(*runs[:2], "--json", expect=2)
    assert line == "evenkeel: --json: only with --metrics; else two runs are compared"
    *_, line = compare("--metrics", runs[0], empty, expect=2)
    assert line == f"evenkeel: {empty}: has no metrics so far; name runs that have logged some"
    (line,) = compare("--metrics", *runs, tmp_path / "missing", expect=2)
    assert line.startswith(f"evenkeel: {tmp_path / 'missing'}: no run there")

"""predictions/SET.json and ranks.jsonl, as others leave them and damaged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenkeel.cli.report.classified import read_classified
from evenkeel.cli.report.ranks import read_ranks
from tests.support.reports import copy_of_a_run, write_predictions, write_ranks

GOOD: dict[str, Any] = {"set": "test", "step": 3, "classes": None, "targets": [0, 1, 1], "predictions": [0, 1, 2]}


def changed(folder: Path, **facts: Any) -> list[Any]:
    (folder / "predictions").mkdir(exist_ok=True)
    (folder / "predictions" / "test.json").write_text(json.dumps(GOOD | facts))
    return read_classified(folder)


def test_the_confusion_matrix_is_that_of_the_predictions(tmp_path: Path) -> None:
    run_dir = copy_of_a_run(tmp_path / "run")
    targets, predictions = write_predictions(run_dir, [f"digit {it}" for it in range(10)])
    (found,) = read_classified(run_dir)
    assert found.confusion.sum() == len(targets)
    for target, prediction in np.ndindex(10, 10):
        both = sum(it == (target, prediction) for it in zip(targets, predictions, strict=True))
        assert found.confusion[target, prediction] == both
    right = [prediction == 3 for target, prediction in zip(targets, predictions, strict=True) if target == 3]
    assert found.recall[3] == pytest.approx(sum(right) / len(right))
    assert (found.part, found.step, found.classes[3], len(found.worst)) == ("test", 60, "digit 3", 12)


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    (found,) = changed(tmp_path)
    assert found.classes == ["0", "1", "2"]
    assert np.isnan(found.recall[2]), "no sample of it"


def test_a_picture_that_did_not_decode_is_left_out(tmp_path: Path) -> None:
    (found,) = changed(tmp_path, targets=[0, -1, 1])
    assert found.confusion.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]
    assert changed(tmp_path, targets=[-1, -1, -1]) == []


def test_only_pictures_get_into_the_page(tmp_path: Path) -> None:
    mistake = {"index": 1, "target": 1, "prediction": 2, "confidence": 0.9}
    images = ['x" onerror="alert(1)', "PHN2Zz4=", "iVBORw0KGgo=", None]
    (found,) = changed(tmp_path, worst=[*[mistake | {"image": it} for it in images], 3])
    assert [it["image"] for it in found.worst] == ["iVBORw0KGgo="]
    (found,) = changed(tmp_path, worst=[mistake | {"image": "iVBORw0KGgo=", "target": 99}])
    assert found.worst == []


@pytest.mark.parametrize(
    "facts",
    [
        {"targets": [0, 1]}, {"targets": []}, {"targets": None}, {"targets": [0.5, 1.0, 2.0]},
        {"predictions": [0, 1, -1]}, {"predictions": [0, 1, 10**30]}, {"classes": ["a", "b"]},
        {"predictions": [[0], [1], [2]]},
    ],
)  # fmt: skip
def test_what_is_no_classification_is_left_out(tmp_path: Path, facts: dict[str, Any]) -> None:
    assert changed(tmp_path, **facts) == []
    file = tmp_path / "predictions" / "test.json"
    file.write_text(json.dumps(GOOD)[:-5])  # cut off
    assert read_classified(tmp_path) == []
    assert read_classified(tmp_path / "no run") == []


def test_ranks_of_which_one_is_slow_and_then_gone(tmp_path: Path) -> None:
    write_ranks(tmp_path)
    found = read_ranks(tmp_path / "ranks.jsonl")
    assert found.slowest == 2
    assert found.hosts == ["node0", "node0", "node1"]
    assert found.arrival[2] == pytest.approx(0.020)
    assert found.data_wait == pytest.approx([0.001] * 3)
    assert found.spread[0] == pytest.approx((0.010, 0.011, 0.020))
    assert found.spread[-1] == pytest.approx((0.010, 0.0105, 0.011))
    assert len(found.steps) == 40, "the cut line is left out"


def test_steps_done_again_count_once_in_the_spread_and_other_lines_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "ranks.jsonl"
    assert read_ranks(file) is None
    file.write_text('null\n{"step": 1}\n')
    assert read_ranks(file) is None
    line = {"time": 0.0, "hosts": ["a", "a"], "arrival": [1.0, 2.0], "data_wait": [0.0, 0.0]}
    file.write_text("".join(json.dumps({"step": step} | line) + "\n" for step in (1, 2, 3, 2)))
    found = read_ranks(file)
    assert found.steps == [1, 2]

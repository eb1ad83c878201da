"""What `predict` refuses before it imports torch, and the columns that it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.cli.predict import PredictCommand, table
from evenkeel.common.errors import Refusal
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance

STATE = {"step": 3, "model": {}, "optimizers": []}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    Checkpoints(tmp_path / "run" / "checkpoints", 2, Provenance(("test/accuracy", "max"))).save(STATE, {})
    (tmp_path / "run" / "config.toml").write_text('task = "classify"\n')
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give --output FILE.csv, and either --input FOLDER or --set test "),
        ({"set": "test", "input": Path("x")}, "and either --input FOLDER or --set test "),
        ({"set": "test", "output": Path()}, "give --output FILE.csv, and either"),
        ({"set": "test", "output": Path("o.txt")}, "--output o.txt: must end in .csv or .parquet"),
        ({"set": "test", "output": Path("nowhere/o.csv")}, "there is no folder nowhere; make it first"),
        ({"set": "test", "checkpoint": "newest"}, "--checkpoint newest: give last, best or one of the steps "),
        ({"set": "test", "checkpoint": "4"}, "--checkpoint 4: give last, best or one of the steps 3"),
        ({"set": "test", "checkpoint": "best"}, "--checkpoint best: no checkpoint of this run has the metric"),
        ({"run": Path("nowhere"), "output": Path()}, "nowhere: no such folder; name a run directory"),
    ],
)
def test_what_is_refused(run_dir: Path, options: dict[str, Any], said: str) -> None:
    given = {"run": run_dir, "output": run_dir.parent / "o.csv", **options}
    with pytest.raises(Refusal, match=said):
        PredictCommand(**given)._check()


def test_parquet_without_pyarrow_says_what_to_install(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Refusal, match=r"needs pyarrow; pip install pyarrow"):
        PredictCommand(run_dir, run_dir.parent / "o.parquet", set="test")._check()


def test_the_columns() -> None:
    rows = {
        "prediction": torch.tensor([[1, 0], [0, 1]]),
        "confidence": torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
        "target": torch.tensor([1, -1]),
        "pixels": torch.tensor([[3, 4], [5, 6]]),
    }
    first = {"index": [0, 1], "prediction": ["dog", "cat"], "confidence": [0.75, 0.5], "target": ["dog", None]}
    second = {"prediction_2": ["cat", "dog"], "confidence_2": [0.25, 0.5]}
    assert table(rows, range(2), ["cat", "dog"]) == {**first, "pixels_0": [3, 5], "pixels_1": [4, 6], **second}

"""TensorBoard and CSV: the same names and values as metrics.jsonl, and nothing twice after a resume."""

import csv
from pathlib import Path
from typing import Any

import pytest

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.run.trackers import CsvFile
from evenkeel.run.tracking import Tracker

PLAN = Plan(samples=100, global_batch=10, micro_batch=5, epochs=2)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself shows."""
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(it.step, it.value) for it in events.Scalars(name)] for name in events.Tags()["scalars"]}


def attempt(folder: Path, start: int, *steps: int, evaluated: bool = False, **options: bool) -> None:
    """An attempt that is killed after its last report."""
    tracker = Tracker(Config(wandb="disabled", **options), PLAN, folder, 1, 1)  # type: ignore[arg-type]
    tracker.start(start, evaluated)
    for step in steps:
        tracker.train(step, 10.0 * start + step, 1.0, 0.1)
        if step % 2 == 0:
            tracker.evaluation(step, {"validation/accuracy": step / 10})


def test_after_a_resume_no_step_stands_twice(tmp_path: Path) -> None:
    """Steps 3 and 4 are lost with the first attempt, and done again."""
    attempt(tmp_path, 0, 1, 2, 3, 4, tensorboard=True, csv=True)
    attempt(tmp_path, 2, 3, 4, 5, tensorboard=True, csv=True)
    found = scalars(tmp_path / "tensorboard")
    expected = [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    assert found["train/loss"] == expected
    assert found["validation/accuracy"] == [(2, pytest.approx(0.2)), (4, pytest.approx(0.4))]
    told = rows(tmp_path / "metrics.csv")
    assert [(int(r["step"]), float(r["train/loss"])) for r in told if r["train/loss"]] == expected
    assert [r["step"] for r in told if r["validation/accuracy"]] == ["2", "4"]
    assert set(found) == set(told[0]) - {"step"}, "the same names"

    # the control: torch's writer as usual, without the step of the resume, shows both attempts
    writer: Any = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    for start, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        naive = writer(tmp_path / "naive")
        for step in steps:
            naive.add_scalar("train/loss", 10 * start + step, step)
        naive.close()
    shown = [step for step, _ in scalars(tmp_path / "naive")["train/loss"]]
    assert sorted(shown) == [1, 2, 3, 3, 4, 4, 5]


def test_an_evaluation_that_is_done_again_is_not_told_again(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 1, 2, csv=True)
    tracker = Tracker(Config(wandb="disabled", csv=True), PLAN, tmp_path, 1, 1)
    tracker.start(2, evaluated={"test/accuracy": 0.5})
    tracker.evaluation(2, {"validation/accuracy": 0.2})
    assert len(rows(tmp_path / "metrics.csv")) == 3


def test_half_a_row_is_dropped_and_a_new_name_gets_a_column(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = CsvFile(path, 0)
    file.log({"train/loss": 1.0}, 1)
    with path.open("a") as torn:
        torn.write("2,0.")
    file = CsvFile(path, 5)
    assert path.read_text() == "step,train/loss\n1,1.0\n"
    file.log({"train/loss": float("nan"), 'odd "name", yes': 2.0}, 3)
    assert rows(path) == [
        {"step": "1", "train/loss": "1.0", 'odd "name", yes': ""},
        {"step": "3", "train/loss": "nan", 'odd "name", yes': "2.0"},
    ]
    CsvFile(path, 0)
    assert rows(path) == []


def test_neither_is_written_unasked_nor_ends_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt(tmp_path, 0, 1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    (tmp_path / "metrics.csv").mkdir()
    attempt(tmp_path, 0, 1, 2, tensorboard=True, csv=True)
    assert caplog.text.count("TensorBoard is off: ") == caplog.text.count("metrics.csv is off: ") == 1

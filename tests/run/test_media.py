"""What a job logs itself: pictures, tables and numbers, as files, in TensorBoard, in the report; and what it cannot."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from evenkeel.cli.report.media import MOST_ROWS, read_media
from evenkeel.cli.report.page import logged
from evenkeel.common.errors import Ended
from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.run import media
from evenkeel.run.records import read_records, values_of
from evenkeel.run.tracking import Tracker
from tests.support.raised import line_of

PLAN = Plan(samples=100, global_batch=10, micro_batch=5, epochs=2)


def tracker(folder: Path, **options: bool) -> Tracker:
    made = Tracker(Config(wandb="disabled", **options), PLAN, folder, 1, 1)  # type: ignore[arg-type]
    made.start(0)
    return made


def test_pictures_tables_and_numbers_go_where_metrics_go(tmp_path: Path) -> None:
    ours = tracker(tmp_path, tensorboard=True, csv=True)
    red = torch.zeros(3, 2, 5)
    red[0] = 1.0
    values = {"red": red, "worst": [{"name": "a|b", "loss": 1.5}, {"name": "<i>", "loss": 2}], "lag": torch.tensor(3)}
    media.log(ours, 7, values)

    picture = Image.open(tmp_path / "media/red/step-00000007.png")
    assert (picture.size, picture.getpixel((0, 0))) == ((5, 2), (255, 0, 0))
    with (tmp_path / "media/worst/step-00000007.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["name", "loss"], ["a|b", "1.5"], ["<i>", "2"]]
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [values_of(record) for record in records if record["kind"] == "log"] == [{"train/lag": 3.0}]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["train/lag"] for row in csv.DictReader(file)] == ["3.0"]
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["red"]
    assert [it.step for it in events.Images("red")] == [7]
    assert events.Tags()["tensors"] == ["worst/text_summary"]


def test_the_report_shows_the_newest_of_each_name_and_nothing_of_theirs_as_html(tmp_path: Path) -> None:
    ours = tracker(tmp_path)
    for step in (9, 100_000_000):
        grey = torch.full((2, 2), step % 256, dtype=torch.uint8)
        media.log(ours, step, {"a/b": grey, "t": [{"<b>": "<script>"}] * 99})
    (tmp_path / "media/a/b/step-00000001.png").write_text("no picture")
    (tmp_path / "media/a/b/step-xx.png").write_text("no step")
    assert [(it.name, it.step, len(it.rows)) for it in read_media(tmp_path)] == [
        ("a/b", 100_000_000, 0),
        ("t", 100_000_000, MOST_ROWS + 1),
    ]
    text = logged(tmp_path)
    assert "data:image/png;base64," in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert logged(tmp_path / "media") == "", "a run that has logged nothing"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"../up": 1.0}, "'../up' is no name"),
        ({3: 1.0}, "3 is no name"),
        ({"x": "text"}, "'x' is"),
        ({"x": torch.zeros(2, 4, 4)}, "'x' is [2, 4, 4] in torch.float32"),
        ({"x": torch.zeros(0, 4)}, "'x' is [0, 4]"),
        ({"x": []}, "'x' is"),
        ([1.0], "give a dict"),
    ],
)
def test_what_cannot_be_logged_is_named(tmp_path: Path, values: Any, why: str) -> None:
    assert why in line_of(Ended, media.log, tracker(tmp_path), 1, values)
    assert not (tmp_path / "media").exists()


def test_a_full_disk_costs_a_picture_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = tracker(tmp_path)
    (tmp_path / "media").write_text("in the way")
    media.log(ours, 1, {"x": torch.zeros(2, 2), "lag": 1})
    assert "media/x/step-00000001.png" in caplog.text
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "log"] == [1]


def test_figures_and_pillow_images_are_pictures_and_floats_beyond_the_range_are_cut() -> None:
    figure: Any = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
    image, cut = Image.new("L", (4, 3), 9), torch.tensor([[-1.0, 2, torch.nan]])
    _, files = media.check({"plot": figure, "image": image, "cut": cut})
    found = {name: Image.open(io.BytesIO(content)) for name, (_, content) in files.items()}
    assert found["plot"].size == (100, 100)
    assert found["image"].size == (4, 3)
    assert [found["cut"].getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (255,) * 3, (0,) * 3]

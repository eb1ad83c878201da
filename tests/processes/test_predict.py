"""`evenkeel predict`: each sample once and in order, the same bytes on any number of ranks; and --save-predictions."""

import base64
import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DistributedSampler

from evenkeel.tasks.digits import digits
from tests.support.processes import ROOT, TRAIN, contents_of, read, run, run_forked, torchrun
from tests.support.small_runs import options, the_line

SAMPLES = 360


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run on the digits, with a validation set and predictions of its last evaluation."""
    run_dir = tmp_path_factory.mktemp("runs") / "digits"
    run_forked(TRAIN, *options("classify", run_dir, "--epochs", 2, "--validation", 0.1, "--save-predictions"))
    before = contents_of(run_dir)
    yield run_dir
    assert contents_of(run_dir) == before, "predict only reads the run"


def predict(trained: Path, *arguments: object, ranks: int = 0, expect: int = 0) -> str:
    """What it prints, or the line by which it ends."""
    words = ["-m", "evenkeel", "predict", trained, *arguments]
    done = run([*torchrun(ranks), *words] if ranks else [sys.executable, *words], expect=expect)
    if not expect:
        return done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("evenkeel: ")]
    return line.removeprefix("evenkeel: ")


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def images(folder: Path, count: int) -> None:
    """The first digits of the test data as files, in two folders."""
    for number in range(count):
        path = folder / ("b" if number % 2 else "a") / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits(train=False).tensors[0][number, 0].numpy()).save(path)


@pytest.mark.promise
def test_each_sample_comes_once_in_order_with_the_same_bytes_on_1_2_and_3_ranks(trained: Path, tmp_path: Path) -> None:
    for ranks in (1, 2, 3, 0):
        said = predict(trained, "--set", "test", "-o", tmp_path / f"{ranks}.csv", "--top", 3, ranks=ranks)
    assert len({(tmp_path / f"{ranks}.csv").read_bytes() for ranks in range(4)}) == 1
    found = rows(tmp_path / "2.csv")
    assert [int(row["index"]) for row in found] == list(range(SAMPLES))
    assert [int(row["target"]) for row in found] == digits(train=False).tensors[1].tolist()
    right = sum(row["prediction"] == row["target"] for row in found) / SAMPLES
    assert right == pytest.approx(read(trained)["metrics"]["test/accuracy"], abs=1e-12)
    assert f"{SAMPLES} predictions of {trained} at step-" in said
    assert f"accuracy {right:.4f}" in said
    assert list(found[0])[4:] == ["prediction_2", "confidence_2", "prediction_3", "confidence_3"]
    assert all(float(r["confidence"]) >= float(r["confidence_2"]) >= float(r["confidence_3"]) for r in found)

    # the control: torch's sampler for 7 ranks, as usual, gives some samples twice
    dealt: list = [DistributedSampler(list(range(SAMPLES)), 7, rank, shuffle=False) for rank in range(7)]
    naive = [index for sampler in dealt for index in sampler]
    assert len(naive) > len(set(naive)) == SAMPLES


def test_a_folder_of_images_is_read_as_the_test_data_is_in_the_order_of_paths(trained: Path, tmp_path: Path) -> None:
    images(tmp_path / "images", 9)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    predict(trained, "--input", tmp_path / "images", "-o", tmp_path / "two.csv", ranks=2)
    predict(trained, "--input", tmp_path / "images", "-o", tmp_path / "one.csv")
    predict(trained, "--set", "test", "-o", tmp_path / "set.csv")
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    found = rows(tmp_path / "one.csv")
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7]
    assert [row.pop("path") for row in found] == [f"{'b' if n % 2 else 'a'}/{n:03}.png" for n in order]
    known = [rows(tmp_path / "set.csv")[number] for number in order]
    assert [row["prediction"] for row in found] == [row["prediction"] for row in known]
    confidences = [[float(row["confidence"]) for row in some] for some in (found, known)]
    assert confidences[0] == pytest.approx(confidences[1], rel=1e-4), "in other micro-batches"
    assert found[0].keys() == {"prediction", "confidence"}


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_damaged_image_is_named_in_a_line_and_nothing_is_written(trained: Path, tmp_path: Path, ranks: int) -> None:
    images(tmp_path / "images", 8)
    bad = tmp_path / "images" / "b" / "007.png"
    bad.write_bytes(bad.read_bytes()[:60])
    said = predict(trained, "--input", tmp_path / "images", "-o", tmp_path / "o.csv", ranks=ranks, expect=1)
    assert str(bad) in said
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_parquet_holds_the_same_and_an_output_is_replaced_only_if_told_so(trained: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "o.parquet"
    out.write_bytes(b"precious")
    arguments = ["--set", "validation", "--checkpoint", "best", "-o"]
    said = predict(trained, *arguments, out, expect=2)
    assert said == f"--output {out}: exists already; name another file, or add --overwrite"
    assert out.read_bytes() == b"precious"
    predict(trained, *arguments, out, "--overwrite")
    predict(trained, *arguments, tmp_path / "o.csv")
    table = parquet.read_table(out).to_pydict()
    assert [{name: str(values[i]) for name, values in table.items()} for i in range(144)] == rows(tmp_path / "o.csv")


def test_the_predictions_that_a_run_saves_are_those_of_its_last_evaluation(trained: Path, tmp_path: Path) -> None:
    predict(trained, "--set", "test", "-o", tmp_path / "o.csv")
    found, known = json.loads((trained / "predictions" / "test.json").read_text()), rows(tmp_path / "o.csv")
    assert (found["set"], found["step"]) == ("test", read(trained)["step"])
    names = found["classes"]
    for key in ("target", "prediction"):
        assert [names[value] for value in found[f"{key}s"]] == [row[key] for row in known]
    wrong = {i: float(row["confidence"]) for i, row in enumerate(known) if row["prediction"] != row["target"]}
    worst = found["worst"]
    assert [it["index"] for it in worst] == sorted(wrong, key=lambda i: -wrong[i])[:24]
    image = Image.open(io.BytesIO(base64.b64decode(worst[0]["image"])))
    shown = torch.tensor(list(image.convert("L").tobytes()), dtype=torch.uint8).view(8, 8)
    assert torch.equal(shown, digits(train=False).tensors[0][worst[0]["index"], 0])
    assert json.loads((trained / "predictions" / "validation.json").read_text())["set"] == "validation"


TASK = """
from dataclasses import dataclass
import torch
from evenkeel.tasks.regress import Regress

@dataclass
class Own(Regress):
    def predict(self, model, batch):
        return {"prediction": model(batch[0]), "size": batch[0].norm(dim=1)}

@dataclass
class Wrong(Regress):
    def predict(self, model, batch):
        return {"prediction": model(batch[0]).mean()}

@dataclass
class Labels(Regress):
    def predict(self, model, batch):
        scores = model(batch[0]).sigmoid()
        return {"probabilities": scores / scores.sum(1, keepdim=True), "target": batch[1]}

@dataclass
class Scores(Regress):
    def predict(self, model, batch):
        return {"probabilities": model(batch[0]).sigmoid()}
"""


def test_a_task_of_ones_own_says_what_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK)
    own, wrong, labels, scores = (tmp_path / name for name in ("Own", "Wrong", "Labels", "Scores"))
    out = tmp_path / "o.csv"

    def train(run_dir: Path, *more: object, expect: int = 0) -> str:
        words = [run_dir, "--samples", 64, "--outputs", 2, "--max-steps", 1, *more]
        return run_forked(TRAIN, *options(f"{tmp_path}/own.py:{run_dir.name}", *words), expect=expect).stderr

    for run_dir in (own, wrong, labels, scores):
        train(run_dir)
    predict(own, "--set", "test", "-o", out)
    assert list(rows(out)[0]) == ["index", "prediction_0", "prediction_1", "size"]
    assert "accuracy" not in predict(labels, "--set", "test", "-o", tmp_path / "l.csv"), "of several labels"
    assert list(rows(tmp_path / "l.csv")[0]) == ["index", "prediction", "confidence", "target_0", "target_1"]
    images(tmp_path / "images", 1)
    for run_dir, given, code, line in (
        (wrong, ["--set", "test"], 1, f"tensor of shape [16] or [16, numbers]; see {tmp_path}/own.py:13"),
        (scores, ["--set", "test"], 1, "predict() returned 'probabilities' that do not add up to 1 in each row: they "),
        (own, ["--input", ROOT / "tools"], 2, "has no images; supported: .jpg"),
        (own, ["--input", tmp_path / "images"], 2, "the task Own has no read_image(path)"),
    ):
        assert line in predict(run_dir, *given, "-o", tmp_path / "w.csv", expect=code)
    said = train(tmp_path / "new" / "Own", "--save-predictions", expect=2)
    assert "--save-predictions: needs a task derived from Classification" in the_line(said)

"""What a replay looks for in a step, and shows of it."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Subset

from evenkeel.common.errors import Refusal
from evenkeel.data.dataset import Collated, InMemory, Limited
from evenkeel.run.records import read_config
from evenkeel.time_travel.command import ReplayCommand
from evenkeel.time_travel.culprit import Culprit, Finder, watched_modules
from evenkeel.time_travel.look import merged, row_of
from evenkeel.time_travel.names import source_of
from evenkeel.time_travel.page import write_page
from evenkeel.time_travel.replay import Replay
from evenkeel.time_travel.save import save_sample
from tests.support.processes import run


def test_a_sample_of_a_part_of_the_data_is_named_whatever_collates_it() -> None:
    files = InMemory(torch.arange(20), torch.arange(20))
    files.paths = [f"file{number}" for number in range(20)]
    part = Limited(files, [2 * number for number in range(10)])
    assert [source_of(it, 5) for it in (part, Collated(part, list))] == ["file10", "file10"]
    assert source_of(Subset(part, [5]), 0) == "file10"


def found(samples: dict[int, float | None], **more: object) -> dict:
    rows = [{"sample": number, "loss": loss} for number, loss in samples.items()]
    return {"loss": 2.0, "nonfinite": None, "note": "", "samples": rows, "activations": {}} | more


def test_the_samples_of_all_ranks_are_there_with_the_largest_loss_first_and_nan_before_it() -> None:
    one = merged([found({3: 1.0, 4: 3.0}, note="as it is"), found({1: math.nan, 2: 2.0}), found({5: None}), found({})])
    assert [row["sample"] for row in one["samples"]] == [1, 4, 2, 3, 5]
    assert one["note"] == "as it is"


def test_what_any_rank_has_found_first_counts_and_the_largest_activation_of_a_module() -> None:
    bad = {"operation": "aten.log"}
    ranks = [found({}, activations={"0": 1.0, "1": 5.0}), found({}, nonfinite=bad, activations={"0": 9.0})]
    one = merged(ranks)
    assert one["nonfinite"] == bad
    assert one["activations"] == [{"module": "0", "largest": 9.0}, {"module": "1", "largest": 5.0}]


def test_a_loss_that_is_no_mean_of_the_samples_of_all_ranks_is_noted() -> None:
    assert merged([found({1: 1.0}), found({2: 3.0})])["note"] == ""
    assert "have the mean 1" in merged([found({1: 1.0}), found({2: 1.0})])["note"]


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def culprit(model: nn.Module, x: Tensor) -> Culprit | None:
    with watched_modules(model, lambda *_: None) as computing, Finder(len(x), [__file__], computing) as finder:
        model(x).sum().backward()
    return finder.found


def test_it_is_named_with_module_line_and_rows() -> None:
    model = nn.Sequential(nn.Identity(), Log(), nn.Linear(2, 1))
    found = culprit(model, torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]]))
    assert (found.operation, found.module, found.value, found.rows) == ("aten.log", "1", "nan", (1,))
    assert found.line.endswith("return x.log()")
    assert not found.given


def test_nan_counts_before_an_earlier_infinity_which_a_mask_may_mean() -> None:
    found = culprit(nn.Sequential(Log(), nn.Softmax(1)), torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True))
    assert (found.module, found.value, found.rows) == ("1", "nan", (1,))
    assert found.given, "the infinity went in"


def test_the_control_finite_arithmetic_has_none() -> None:
    assert culprit(nn.Sequential(Log(), nn.Linear(2, 1)), torch.ones(3, 2)) is None


def test_a_gradient_that_is_not_finite_is_found_in_the_backward_pass() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sqrt()

    found = culprit(Root(), torch.ones(3, 2))
    assert (found.value, found.module) == ("inf", "")


EVIL = "<script>alert('x')</script>&\"a"
CULPRIT = {
    "operation": "aten.log", "module": EVIL, "line": EVIL, "value": "nan", "rows": [0], "given": True,
    "samples": [{"sample": 7, "source": EVIL}],
}  # fmt: skip
STEP: dict = {
    "step": 4, "loss": math.nan, "norm": math.inf, "note": EVIL, "nonfinite": CULPRIT,
    "samples": [{"sample": 7, "source": EVIL, "loss": math.nan}, {"sample": 31, "source": "", "loss": None}],
    "layers": [{"name": EVIL, "gradient": None, "update": 0.125, "weights": 2.5}],
    "activations": [{"module": EVIL, "largest": 1234.5}],
}  # fmt: skip


def test_it_shows_all_that_was_found_and_what_a_user_has_named_as_text(tmp_path: Path) -> None:
    found = Replay(started=3, steps=[STEP], agrees=False, agreement=EVIL, other=EVIL, ended=EVIL)
    write_page(tmp_path / "found.html", EVIL, found)
    text = (tmp_path / "found.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 10
    assert not [it for it in ("http:", "https:", "@import", " src=", "url(") if it in text]
    for shown in ("checkpoint of step 3", "Step 4", "aten.log", "0.125", "2.5", "1234.5", ">31<", "differs"):
        assert shown in text


@pytest.mark.parametrize(
    ("file", "line"), {"old.html": "exists", "no/new.html": "no folder", "run/new.html": "is in the run"}.items()
)
def test_a_file_that_cannot_be_new_is_refused_before_the_replay(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / "old.html").write_text("mine")
    with pytest.raises(Refusal, match=f"--html .*{file}.*{line}"):
        ReplayCommand(tmp_path / "run", "4", html=tmp_path / file)([])
    assert (tmp_path / "old.html").read_text() == "mine"


def test_pictures_text_and_tensors(tmp_path: Path) -> None:
    pictures = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    grey = torch.rand(2, 1, 4, 5)
    bad = torch.full((2, 1, 4, 5), torch.nan)
    batch = {"image": pictures, "grey": grey, "bad": bad, "label": torch.tensor([7, 8]), "text": ["a", "b"]}
    save_sample(tmp_path, 4, 37, {**row_of(batch, 1, 2), "text": "b"})
    assert sorted(path.name.removeprefix("step-4-sample-37-") for path in tmp_path.iterdir()) == [
        "bad.pt", "grey.png", "image.png", "label.pt", "text.txt",
    ]  # fmt: skip
    found = np.asarray(Image.open(tmp_path / "step-4-sample-37-image.png"))
    assert (found == pictures[1].permute(1, 2, 0).numpy()).all()
    assert np.asarray(Image.open(tmp_path / "step-4-sample-37-grey.png")).max() == 255
    assert torch.load(tmp_path / "step-4-sample-37-bad.pt", weights_only=True).isnan().all()
    assert torch.load(tmp_path / "step-4-sample-37-label.pt", weights_only=True) == 8
    assert (tmp_path / "step-4-sample-37-text.txt").read_text() == "b"


def test_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    """Of the options, of a replay's copy of them, of metrics, and of texts."""
    (tmp_path / "config.toml").write_text('data_dir = "photos d\u2019\u00e9t\u00e9"\n', encoding="utf-8")
    (tmp_path / "metrics.csv").write_text("step,d\u00e9faut\n3,1.0\n", encoding="utf-8")
    code = f"""from pathlib import Path
from evenkeel.run.records import read_config
from evenkeel.run.trackers import CsvFile, _read_table
from evenkeel.time_travel.replay import _prepare
from evenkeel.time_travel.save import save_sample
folder = Path({str(tmp_path)!r})
_prepare(folder / "replay", read_config(folder / "config.toml"), {{}}, [])
CsvFile(folder / "metrics.csv", 3).log({{"d\\u00e9faut": 2.0}}, 4)
print(ascii(_read_table(folder / "metrics.csv")))
save_sample(folder, 1, 2, ["\\u00e9"])"""
    done = run([sys.executable, "-c", code], env={"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"})
    assert read_config(tmp_path / "replay" / "config.toml") == {"data_dir": "photos d\u2019\u00e9t\u00e9"}
    assert done.stdout == "[['step', 'd\\xe9faut'], ['3', '1.0'], ['4', '2.0']]\n"
    assert [path.read_bytes() for path in tmp_path.glob("*.txt")] == [b"\xc3\xa9"]

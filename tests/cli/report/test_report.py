"""The page, the CSV and the PNGs that the command writes; what it refuses."""

import csv
import json
import re
import shutil
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evenkeel.cli.report.command import ReportCommand
from evenkeel.cli.report.theme import LIGHT
from tests.support.processes import ROOT
from tests.support.raised import refusal_of
from tests.support.reports import copy_of_a_run, write_predictions, write_ranks

EVIL = '<script>alert("1")<img src=x onerror=alert(2)>$x^2$&amp;'


class Page(HTMLParser):
    """The tags of a page, its ids, and all that might ask for something or run."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags, self.ids, self.addresses = Counter[str](), Counter[str](), set[str]()
        self.handlers, self.labels, self.texts = [], [], list[str]()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            self.ids[str(value)] += name == "id"
            if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
                self.addresses.add(str(value)[:5])
            if name.startswith("on"):
                self.handlers.append((tag, name))
            if name == "aria-label":
                self.labels.append(value)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything, and with names that mean something in HTML and in matplotlib."""
    run_dir = copy_of_a_run(tmp_path_factory.mktemp("report") / EVIL)
    write_predictions(run_dir, [f"{EVIL}{it}" for it in range(10)])
    shutil.copy(run_dir / "predictions" / "test.json", run_dir / "predictions" / f"{EVIL[:8]}.json")
    write_ranks(run_dir)
    (run_dir / "ranks.jsonl").write_text((run_dir / "ranks.jsonl").read_text().replace("node1", EVIL[:8]))
    with (run_dir / "config.toml").open("a") as file:
        file.write(f"extra = '{EVIL}'\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "eval", "step": 60, "time": 1795316311.0, f"test/{EVIL}": 1.0}) + "\n")
        file.write(json.dumps({"kind": "failure", "step": 60, "time": 1795316312.0, "reason": EVIL}) + "\n")
    assert ReportCommand((run_dir,), png=run_dir / "png")() == 0
    return run_dir


def test_the_page_loads_nothing_and_runs_nothing(rich: Path) -> None:
    text = (rich / "report.html").read_text()
    assert not [it for it in ("http:", "https:", "@import") if it in text]
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    page = Page(rich / "report.html")
    assert page.addresses <= {"data:", "data", *(it for it in page.addresses if it.startswith("#"))}
    assert not page.handlers
    assert not {"script", "iframe", "object", "embed", "form", "base"} & page.tags.keys()
    assert "default-src 'none'" in text


def test_what_a_user_has_named_is_shown_as_it_is(rich: Path) -> None:
    page = Page(rich / "report.html")
    assert page.tags["img"] == 24, "the images of two sets, and none of a name"
    shown = "".join(page.texts)
    assert EVIL in shown
    assert f"failed: {EVIL}" in shown
    assert f"--extra {EVIL}" in shown
    assert EVIL in json.dumps(page.labels).replace('\\"', '"')


def test_it_says_which_samples_an_epoch_has(tmp_path: Path) -> None:
    run_dir = copy_of_a_run(tmp_path / "run")
    assert ReportCommand((run_dir,))() == 0
    plain = (run_dir / "report.html").read_text()
    assert "read in" not in plain
    assert "without the end" not in plain
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(status | {"order": "50 draws by <b>weights</b>"}))
    with (run_dir / "config.toml").open("a") as file:
        file.write("drop_last = true\n")
    assert ReportCommand((run_dir,))() == 0
    text = (run_dir / "report.html").read_text()
    assert "read in 50 draws by &lt;b&gt;weights&lt;/b&gt;" in text
    assert "without the end of an epoch that fills no batch" in text


def test_each_figure_has_words_and_no_id_comes_twice(rich: Path) -> None:
    page = Page(rich / "report.html")
    assert len(page.labels) == page.tags["svg"] >= 12
    assert all(page.labels)
    del page.ids["None"]
    assert {name: times for name, times in page.ids.items() if times > 1} == {}
    text = (rich / "report.html").read_text()
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(page.ids)
    pictures = {path.name: path.read_bytes() for path in (rich / "png").iterdir()}
    assert {"loss.png", "timeline.png", "test-confusion.png", "script-confusion.png", "ranks.png"} <= pictures.keys()
    assert all(content.startswith(b"\x89PNG") and len(content) > 3000 for content in pictures.values())


def test_colours_are_those_of_the_style_sheet_and_change_in_the_dark(rich: Path) -> None:
    style = (ROOT / "src" / "evenkeel" / "assets" / "page.css").read_text()
    light, dark = style.split("prefers-color-scheme: dark")
    for name, colour in LIGHT.items():
        assert f"--{name}: {colour};" in light
        assert f"--{name}: #" in dark
        assert f"--{name}: {colour};" not in dark
    body = (rich / "report.html").read_text().split("</style>")[1]
    assert set(re.findall(r"#[0-9a-f]{6}\b", body)) <= {"#ffffff"}, "white numbers in full cells"


def test_csv_has_the_numbers_of_metrics_jsonl(tmp_path: Path) -> None:
    runs = tuple(copy_of_a_run(tmp_path / name, name) for name in ("finished", "typed"))
    ReportCommand(runs, csv=tmp_path / "all.csv")()
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        found = [(it["run"], it["kind"], int(it["step"]), it["name"], float(it["value"])) for it in rows]
    expected, others = [], ("kind", "step", "time", "epoch", "spent")
    for run_dir in runs:
        for record in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
            if part := {"train": "train", "eval": "test"}.get(record["kind"]):
                place = (run_dir.name, record["kind"], record["step"])
                expected += [(*place, f"{part}/{name}", it) for name, it in record.items() if name not in others]
    assert found == expected
    assert len(found) > 300


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = tuple(copy_of_a_run(tmp_path / name, name) for name in ("finished", "typed", "tree"))
    assert ReportCommand(runs)() == 0
    page = Page(tmp_path / "report.html")
    shown = " ".join(page.texts)
    assert all(text in shown for text in ("3 runs", "Timeline: tree", "--reduce"))
    text = (tmp_path / "report.html").read_text()
    (last,) = re.findall(r'<th scope="row">test/loss</th>(.*?)</tr>', text)
    assert last.count("<td>") == 3
    assert last.startswith(f"<td>{json.loads((runs[0] / 'summary.json').read_text())['metrics']['loss']:.4g}</td>")
    losses = next(label for label in page.labels if label.startswith("Loss (train)"))
    assert all(run.name in losses for run in runs)


def refused(*runs: Path, **options: Any) -> str:
    return refusal_of(ReportCommand(runs, **options))


def test_only_a_report_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, mine = copy_of_a_run(tmp_path / "run"), tmp_path / "mine"
    mine.write_text("my notes")
    for option in ("output", "csv"):
        assert "was not made by `evenkeel report`; name another file" in refused(run_dir, **{option: mine})
    (tmp_path / "png").mkdir()
    (tmp_path / "png" / "loss.png").write_bytes(b"\x89PNG of mine")
    assert "loss.png: exists" in refused(run_dir, png=tmp_path / "png")
    assert "is the report's own file" in refused(run_dir, output=tmp_path / "both", csv=tmp_path / "both")
    assert "no run is named" in refused()
    assert "no run there" in refused(run_dir, tmp_path)
    assert not (run_dir / "report.html").exists(), "nothing is written then"
    for _ in range(2):
        assert ReportCommand((run_dir,), csv=tmp_path / "a.csv", png=tmp_path / "new")() == 0
    assert (run_dir / "report.html").stat().st_mode & 0o077 == 0, "as config.toml, whose options it has"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text('task = "classify"\n')
    assert ReportCommand((tmp_path / "empty",))() == 0
    assert "Nothing has been recorded yet" in (tmp_path / "empty" / "report.html").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(run_dir).endswith("pip install matplotlib")

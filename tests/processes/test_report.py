"""Reports of real runs: ten ends on other numbers of ranks, two tasks, a run at work; and what a browser says."""

import re
import signal
import time
from itertools import cycle, islice
from pathlib import Path

import pytest

from evenkeel.common.files import append_json
from tests.support.processes import TRAIN, fork_ranks, read, records, stop
from tests.support.reports import copy_of_a_run, in_a_browser, needs_chromium, report, write_predictions, write_ranks
from tests.support.small_runs import job, signal_ranks_at, told_step, trained, wait_for_step

ENDS = 10
RANKS = list(islice(cycle([2, 3, 1]), ENDS + 1))
HOW = list(islice(cycle([signal.SIGKILL, signal.SIGTERM]), ENDS))


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose ranks were all killed or stopped ten times, and continued on another number of ranks each time."""
    run_dir = tmp_path_factory.mktemp("report") / "disturbed"
    options = job(run_dir, "--epochs", 12, "--pause", 0.05, "--checkpoint-every", 2, "--eval-every", 5)
    for ranks, number in zip(RANKS, HOW, strict=False):
        before, started = told_step(run_dir), fork_ranks(ranks, TRAIN, *options)
        signal_ranks_at(before + 3, run_dir, started, number)
    trained(RANKS[-1], options)
    return run_dir


def test_each_end_is_in_the_timeline(disturbed: Path) -> None:
    done = report(disturbed)
    assert (done.stdout.splitlines()[0], done.stderr) == (str(disturbed / "report.html"), "")
    page = (disturbed / "report.html").read_text()
    (told,) = re.findall(r'aria-label="Steps over time and a bar for each attempt: ([^"]*)\."', page)
    names = {signal.SIGKILL: "killed", signal.SIGTERM: "stopped"}
    attempts = [it.split(", ") for it in told.split("; ")]
    assert [it[1] for it in attempts] == [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS]
    assert [it[3] for it in attempts] == [*(names[it] for it in HOW), "finished"]
    assert [it[2].split()[1] for it in attempts] == [str(it["step"]) for it in records(disturbed, "start")]
    assert "on 1 to 3 ranks" in page

    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(\d*)", page))
    lines = [record["step"] for record in records(disturbed, "train")]
    assert tiles["steps"] == "108"
    assert tiles["attempts"] == str(ENDS + 1)
    assert int(tiles["steps done again"]) == len(lines) - len(set(lines)), "what was killed all at once is done again"

    goodput = re.search(r"<dt>goodput</dt><dd>(\d+)%", page)
    assert abs(int(goodput[1]) - 100 * read(disturbed)["goodput"]) <= 2


def test_a_run_at_work_and_one_that_was_killed(tmp_path: Path) -> None:
    (rank,) = fork_ranks(0, TRAIN, *job(tmp_path / "run", "--pause", 0.2, "--epochs", 1000))
    wait_for_step(tmp_path / "run", 3, rank)
    report(tmp_path / "run", "--output", tmp_path / "at-work.html")
    stop(rank, signal.SIGKILL)
    report(tmp_path / "run")
    assert ">running<" in (tmp_path / "at-work.html").read_text()
    assert re.search(r">lost at step \d+<", (tmp_path / "run" / "report.html").read_text())
    again = {"kind": "start", "step": 2, "time": time.time(), "last_end": "rank 0 was killed by SIGKILL"}
    append_json(tmp_path / "run" / "metrics.jsonl", again)  # as a rank that its keeper has forked again
    report(tmp_path / "run")
    assert ">killed: rank 0 was killed by SIGKILL<" in (tmp_path / "run" / "report.html").read_text()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, disturbed: Path) -> dict[str, Path]:
    """Of a run with all that there may be, and of two runs."""
    folder = tmp_path_factory.mktemp("pages")
    run_dir = copy_of_a_run(folder / "a run with a name that is long enough to need more than one line of a phone")
    write_predictions(run_dir)
    write_ranks(run_dir)
    report(run_dir)
    report(run_dir, disturbed, "--output", folder / "both.html")
    return {"one": run_dir / "report.html", "both": folder / "both.html"}


@needs_chromium
@pytest.mark.parametrize("which", ["one", "both"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_in_a_browser(pages: dict[str, Path], which: str, width: int, dark: bool) -> None:
    seen = in_a_browser(pages[which], width, dark)
    assert seen.console == ""
    assert seen.requests == set()
    ink = "rgb(227, 232, 239)" if dark else "rgb(31, 39, 51)"  # of the heading
    assert seen.measured == {"width": width, "lacking": 0, "scrolls": False, "wide": [], "ink": ink}
    for element in ("<svg", 'role="img"', "<table", "<footer", "data:image/png;base64,", "prefers-color-scheme"):
        assert element in seen.dom


@needs_chromium
def test_the_control_a_wide_page_an_error_and_a_request_are_seen(pages: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    bad = '<p style="width:2000px">wide</p><img src="missing.png"><script>console.error("an error"); nothing()</script>'
    page.write_text(pages["one"].read_text().replace("</main>", f"{bad}</main>"))
    seen = in_a_browser(page, 390)
    assert seen.measured["scrolls"]
    assert seen.measured["wide"] == ["P."]
    assert seen.measured["lacking"] == 1
    assert seen.requests == {"/missing.png"}
    for error in ("an error", "nothing is not defined", "Content Security Policy"):
        assert error in seen.console

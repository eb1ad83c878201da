"""`python -m evenkeel status` on real runs in every state, as a user types it."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenkeel.cli.status import Metrics, status_of
from evenkeel.run.records import goodput, ledger, read_records
from tests.cli.test_status import LONG, STATUS, endless, facts
from tests.support import processes
from tests.support.processes import ROOT, TRAIN, contents_of, evenkeel, finish, fork, kill_group, read, start, torchrun
from tests.support.small_runs import BUG, PLAN, job, stop_at, told_step, wait_for_step, workers_of
from tests.support.terminal import Terminal

BUG_OF_A_STEP = BUG.replace(" at ", " (one of the samples 38, 87, 82) at ")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs that have finished, failed, were stopped and killed; one at work goes on as long as the tests do."""
    folder = tmp_path_factory.mktemp("status") / "runs"
    finished = fork(TRAIN, *job(folder / "finished"))
    failed = fork(TRAIN, *job(folder / "sweep" / "failed", "--fail-at", 10))
    stopped, killed = (fork(TRAIN, *endless(folder / name)) for name in ("sweep/stopped", "killed"))
    stop_at(folder / "sweep" / "stopped", 3, stopped, signal.SIGTERM, 75)
    stop_at(folder / "killed", 3, killed, signal.SIGKILL, -signal.SIGKILL)
    assert [finish(process).returncode for process in (finished, failed)] == [0, 1]
    working = start(torchrun(2, TRAIN, *endless(folder / "working"), restarts=3))
    try:
        wait_for_step(folder / "working", 3, working)
        yield folder
    finally:
        processes.stop(working)


def test_every_state_is_told(runs: Path) -> None:
    dead = {name: contents_of(runs / name) for name in ("finished", "sweep", "killed")}
    found = facts(runs)
    assert {name: (it["state"], it["why"]) for name, it in found.items()} == {
        "finished": ("finished", ""),
        "failed": ("failed", BUG_OF_A_STEP),
        "stopped": ("stopped", "SIGTERM"),
        "killed": ("lost", "its process is gone and recorded no reason; perhaps it was killed"),
        "working": ("running", ""),
    }
    assert read(runs / "killed", "status.json")["state"] == "running", "the control: its folder alone tells a lie"
    assert found["finished"]["step"] == found["finished"]["total_steps"] == PLAN.total_steps
    metrics = found["finished"]["metrics"]
    assert {k: v for k, v in metrics.items() if k.startswith("test/")} == read(runs / "finished")["metrics"]
    assert found["stopped"]["step"] == read(runs / "sweep" / "stopped", "status.json")["step"]
    working = found["working"]
    assert working["step"] >= 3
    assert working["total_steps"] == LONG
    # at least a pause of 0.1 s a step; and on a busy machine no more than two hundred times that
    assert 0.1 * (LONG - working["step"]) < working["eta"] < 20 * LONG
    assert [name for name, it in found.items() if it["eta"] is not None] == ["working"]
    for it in found.values():
        assert it["metrics"]["train/loss"] > 0 or it is found["finished"]
        assert it["starts"] == 1
        assert 0 < it["goodput"] < 1
        assert it["job"] is None
    assert {name: contents_of(runs / name) for name in dead} == dead, "it only looks"


def test_the_table_fits_the_terminal(runs: Path) -> None:
    wide = evenkeel("status", runs).stdout
    header, *lines = wide.splitlines()
    assert header.split()[:7] == ["RUN", "STATE", "STEP", "DONE", "ETA", "METRICS", "ATTEMPTS"], "and no JOB"
    assert "GOODPUT" not in header or "%" in wide.rpartition("GOODPUT")[2], "empty in the first minute"
    assert re.search(rf"{runs}/finished +finished +27/27 +100% +train/loss \d\.\d{{4}} +1\b", wide, re.MULTILINE)
    assert f"{runs}/sweep/failed: failed: {BUG_OF_A_STEP}" in lines
    short = os.path.relpath(runs, ROOT)  # a long name has to be broken
    for width, columns in ((200, 8), (len(short) + 30, 3), (30, 3)):
        text = evenkeel("status", short, env={"COLUMNS": str(width)}).stdout
        assert max(map(len, text.splitlines())) <= width
        header, *lines = text.splitlines()
        assert header.split()[:3] == ["RUN", "STATE", "STEP" if columns == 8 else "DONE"]
        assert sum(line.split()[1:2] == ["running"] or " running " in f"{line} " for line in lines) == 1
        assert "a bug in the user's loss" in " ".join(text.split())


def test_watch_shows_progress_until_ctrl_c(runs: Path) -> None:
    with Terminal([*STATUS, str(runs / "working"), "--watch"], columns=240) as terminal:
        terminal.read_until(r"working +running +\d+/")
        first = int(re.findall(r"running +(\d+)/", terminal.text)[-1])
        later = rf"running +(?!{first}/)\d+/"
        terminal.read_until(later)
        terminal.press_ctrl_c()
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text
        assert terminal.output.rfind("\x1b[?25h") > terminal.output.rfind("\x1b[?25l"), "the cursor is back"


def test_a_run_whose_ranks_are_started_again_is_not_lost(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "restarted"
    process = start(torchrun(2, TRAIN, *endless(run_dir), restarts=1))
    metrics = Metrics(run_dir / "metrics.jsonl")
    try:
        wait_for_step(run_dir, 3, process)
        assert status_of(run_dir, metrics).starts == 1
        pids = workers_of(process)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)  # both, or the other would tell of a failure
        whys = set()
        while (it := status_of(run_dir, metrics)).starts == 1:
            assert it.state == "running", it
            whys.add(it.why)
        assert whys >= {"torchrun restarts its ranks"}
        wait_for_step(run_dir, told_step(run_dir) + 2, process)
        process.send_signal(signal.SIGSTOP)  # or it would start them again, and its death would be a notice to them
        for pid in workers_of(process).values():
            os.kill(pid, signal.SIGKILL)
    finally:
        kill_group(process)
        process.communicate()
    # data that workers inherited from a rank may keep its lock for a moment
    processes.wait_until(lambda: status_of(run_dir, Metrics(run_dir / "metrics.jsonl")).state == "lost", "its loss", 60)
    it = status_of(run_dir, Metrics(run_dir / "metrics.jsonl"))
    assert it.starts == 2
    assert it.eta is None
    assert it.goodput == goodput(ledger(read_records(run_dir / "metrics.jsonl")))
    metrics.update()
    assert goodput(metrics.ledger()) == it.goodput, "read in parts, or at once"

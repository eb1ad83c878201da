"""`python -m evenkeel status` on real runs in every state, as a user types it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from evenkeel.cli.status import Metrics, RunStatus, status_of
from evenkeel.run.records import goodput, ledger, read_records
from tests.cli.test_status import (
    LONG,
    STATUS,
    endless,
    facts,
    runs,  # noqa: F401  (a fixture)
    status,
)
from tests.support import processes
from tests.support.processes import TRAIN, contents_of, kill_group, read, start, torchrun
from tests.support.small_runs import PLAN, wait_for_step, workers_of
from tests.support.terminal import Terminal


def wait_until_lost(run_dir: Path) -> RunStatus:
    """Data that workers inherited from a rank may keep its lock for a moment."""
    deadline = time.monotonic() + 60
    while (it := status_of(run_dir, Metrics(run_dir / "metrics.jsonl"))).state != "lost":
        assert time.monotonic() < deadline, it
        time.sleep(0.1)
    return it


def test_every_state_is_told(runs: Path) -> None:
    dead = {name: contents_of(runs / name) for name in ("finished", "sweep", "killed")}
    found = facts(runs)
    assert {name: it["state"] for name, it in found.items()} == {
        "finished": "finished", "failed": "failed", "stopped": "stopped", "killed": "lost", "working": "running",
    }  # fmt: skip
    assert read(runs / "killed", "status.json")["state"] == "running", "the control: its folder alone tells a lie"
    whys = {name: it["why"] for name, it in found.items()}
    assert whys == {
        "finished": "",
        "failed": "ZeroDivisionError: a bug in the user's loss",
        "stopped": "SIGTERM",
        "killed": "its process is gone and gave no reason: killed, perhaps",
        "working": "",
    }
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
    wide = status(runs).stdout
    header, *lines = wide.splitlines()
    assert header.split() == ["RUN", "STATE", "STEP", "DONE", "ETA", "METRICS", "STARTS", "GOODPUT"], "and no JOB"
    assert re.search(rf"{runs}/finished +finished +27/27 +100% +train/loss \d\.\d{{4}} +1 +\d+%$", wide, re.MULTILINE)
    assert f"{runs}/sweep/failed: ZeroDivisionError: a bug in the user's loss" in lines
    short = os.path.relpath(runs, processes.ROOT)  # a long name has to be broken
    for width, columns in ((200, 8), (len(short) + 30, 3), (30, 3)):
        text = status(short, env={"COLUMNS": str(width)}).stdout
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
        deadline, whys = time.monotonic() + processes.LIMIT, set()
        while (it := status_of(run_dir, metrics)).starts == 1:
            assert it.state == "running", it
            assert time.monotonic() < deadline
            whys.add(it.why)
            time.sleep(0.02)
        assert whys >= {"torchrun restarts its ranks"}
        seen = len(processes.records(run_dir, "train"))
        while len(processes.records(run_dir, "train")) < seen + 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)  # or it would start them again, and its death would be a notice to them
        for pid in workers_of(process).values():
            os.kill(pid, signal.SIGKILL)
    finally:
        kill_group(process)
        process.communicate()
    it = wait_until_lost(run_dir)
    assert it.starts == 2
    assert it.eta is None
    assert it.goodput == goodput(ledger(read_records(run_dir / "metrics.jsonl")))
    metrics.update()
    assert metrics.goodput() == it.goodput, "read in parts, or at once"

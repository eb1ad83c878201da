"""`python -m evenkeel status` on real runs in every state, as a user types it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.checkpoint import Checkpoints, read_manifest
from evenkeel.ledger import goodput, ledger
from evenkeel.records import read_records
from evenkeel.slurm.record import JobRecord
from evenkeel.standing import Metrics, Standing, standing

from . import processes
from .processes import TRAIN, kill_group, read, run, start, torchrun
from .terminal import Terminal
from .test_inspection import contents_of
from .test_old_runs import RUNS
from .test_survival import workers_of
from .test_train import PLAN, TASK, job, wait_for_step

LONG = 10_000  # steps, so that a run outlives its tests
NO_SLURM = {"PATH": str(Path(sys.executable).parent)}
TRAINING = {"train/loss", "train/grad_norm", "train/lr", "train/samples_per_s"}
STATUS = [sys.executable, "-m", "evenkeel", "status"]


def status(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run([*STATUS, *map(str, arguments)], env=env)


def facts(*arguments: object, env: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Folder's name -> what --json says of its run."""
    listed = json.loads(status(*arguments, "--json", env=env).stdout)
    return {Path(it["run"]).name: it for it in listed}


def endless(run_dir: Path) -> list[str]:
    more = ["--task", TASK, "--run-dir", run_dir, "--wandb", "disabled", "--max-steps", LONG, "--epochs", LONG]
    return [str(option) for option in [*more, "--batch-size", 12, "--log-every", 1, "--pause", 0.1, "--eval-every", 2]]


def wait_until_lost(run_dir: Path) -> Standing:
    """Data that workers inherited from a rank may keep its lock for a moment."""
    deadline = time.monotonic() + 60
    while (it := standing(run_dir, Metrics(run_dir / "metrics.jsonl"), None, None)).state != "lost":
        assert time.monotonic() < deadline, it
        time.sleep(0.1)
    return it


def write_run(folder: Path, **facts: Any) -> Path:
    """What a run leaves that has done nothing yet."""
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / "status.json").write_text(json.dumps({"state": "running", "pid": 1, "world_sizes": [1]} | facts))
    return folder


def submitted(run_dir: Path, job_id: str = "17") -> None:
    folder = run_dir.resolve()
    names = {"job_id": job_id, "run_dir": str(folder), "folder": str(folder), "log": str(folder / "log")}
    JobRecord(**names, nodes="1", gpus=1, revision="", train_args=(), submitted=time.time()).save()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs that have finished, failed, were stopped and killed; one at work goes on as long as the tests do."""
    folder = tmp_path_factory.mktemp("status") / "runs"
    finished = start([sys.executable, str(TRAIN), *job(folder / "finished")])
    failed = start([sys.executable, str(TRAIN), *job(folder / "sweep" / "failed", "--fail-at", 10)])
    stopped = start([sys.executable, str(TRAIN), *endless(folder / "sweep" / "stopped")])
    killed = start([sys.executable, str(TRAIN), *endless(folder / "killed")])
    wait_for_step(folder / "sweep" / "stopped", 3, stopped)
    wait_for_step(folder / "killed", 3, killed)
    stopped.send_signal(signal.SIGTERM)
    kill_group(killed)
    for process, code in ((finished, 0), (failed, 1), (stopped, 75), (killed, -signal.SIGKILL)):
        done = processes.finish(process)
        assert done.returncode == code, done.stderr[-3000:]
    working = start(torchrun(2, TRAIN, *endless(folder / "working"), restarts=3))
    try:
        wait_for_step(folder / "working", 3, working)
        yield folder
    finally:
        working.send_signal(signal.SIGTERM)
        processes.finish(working)


@pytest.mark.multiprocess
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
        "killed": "its process has ended without a word, or was killed",
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


@pytest.mark.multiprocess
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


@pytest.mark.multiprocess
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


@pytest.mark.multiprocess
def test_a_run_whose_ranks_are_started_again_is_not_lost(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "restarted"
    process = start(torchrun(2, TRAIN, *endless(run_dir), restarts=1))
    metrics = Metrics(run_dir / "metrics.jsonl")
    try:
        wait_for_step(run_dir, 3, process)
        assert standing(run_dir, metrics, None, None).starts == 1
        pids = workers_of(process)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)  # both, or the other would tell of a failure
        deadline, whys = time.monotonic() + processes.LIMIT, set()
        while (it := standing(run_dir, metrics, None, None)).starts == 1:
            assert it.state == "running", it
            assert time.monotonic() < deadline
            whys.add(it.why)
            time.sleep(0.02)
        assert whys >= {"its ranks are started again"}
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


def test_a_run_on_another_machine(tmp_path: Path) -> None:
    write_run(tmp_path / "fresh", host="elsewhere", time=time.time() - 30)
    write_run(tmp_path / "old", host="elsewhere", time=time.time() - 3 * 3600)
    write_run(tmp_path / "here", host=socket.gethostname(), time=time.time())
    found = facts(tmp_path)
    assert {name: it["state"] for name, it in found.items()} == {"fresh": "unknown", "old": "lost", "here": "lost"}
    assert found["fresh"]["why"].startswith("on elsewhere, which cannot be asked from here; last heard of ")
    assert found["old"]["why"] == "on elsewhere, and nothing was heard of it for 3 h"


def test_without_slurm_a_job_is_unknown_and_the_run_is_not(tmp_path: Path) -> None:
    submitted(write_run(tmp_path / "done", state="finished", step=5, total_steps=5))
    submitted(tmp_path / "waiting")
    done = status(tmp_path, "--json", env=NO_SLURM)
    asked = "Slurm cannot be asked: squeue: not found: is this a login node of the cluster?"
    assert done.stderr == f"evenkeel: {asked}\n"
    found = {Path(it["run"]).name: it for it in json.loads(done.stdout)}
    assert found["done"]["state"] == "finished"
    assert found["waiting"]["state"] == "unknown"
    assert found["waiting"]["job"] == {"id": "17", "state": None, "reason": None, "nodes": None, "requeues": None}
    text = status(tmp_path, env=NO_SLURM).stdout
    assert asked in text.splitlines()
    assert re.search(r"waiting +unknown +17 \? +0/\? +0$", text, re.MULTILINE)


def test_files_that_are_none_of_a_run(tmp_path: Path) -> None:
    assert status(tmp_path).stdout == f"no run below {tmp_path}\n"
    assert facts(tmp_path) == {}
    (write_run(tmp_path / "cut") / "status.json").write_text('{"state": "run')
    (write_run(tmp_path / "list") / "status.json").write_text("[1]")
    (write_run(tmp_path / "torn", state="finished") / "metrics.jsonl").write_text(
        '{"kind": "tr\nnull\n{"kind": "x"}\n{'
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "status.json").write_text("{}")  # of another program
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    found = json.loads(status(tmp_path, link, "--json").stdout)
    assert [(Path(it["run"]).name, it["state"]) for it in found] == [
        ("cut", "unknown"), ("list", "unknown"), ("torn", "finished"),
    ]  # fmt: skip
    assert found[0]["why"].startswith("status.json cannot be read: ")


def test_a_run_of_another_version_has_the_names_of_this_one(tmp_path: Path) -> None:
    """Version 0.1.0 wrote bare names, and a run that it began may have been continued."""
    run_dir = shutil.copytree(RUNS / "finished", tmp_path / "finished")
    metrics = Metrics(run_dir / "metrics.jsonl")
    found = standing(run_dir, metrics, None, None).metrics
    assert set(found) == {*TRAINING, "test/loss", "test/accuracy"}
    assert read(run_dir)["metrics"] == {"loss": found["test/loss"], "accuracy": found["test/accuracy"]}, "the control"
    with (run_dir / "metrics.jsonl").open("a") as file:
        now = {"step": 61, "time": time.time()}
        file.write(json.dumps({"kind": "train", "epoch": 4.1} | now | dict.fromkeys(TRAINING, 0.5)) + "\n")
    again = standing(run_dir, metrics, None, None).metrics
    assert again == found | dict.fromkeys(TRAINING, 0.5)
    # the best checkpoint is told by a metric of old and of new manifests
    old, *_ = (checkpoints := Checkpoints(run_dir / "checkpoints", 9, ("accuracy", "max"))).all()
    assert read_manifest(old).best_by == ("test/accuracy", "max")
    assert read_manifest(old).metrics.keys() == {"test/loss", "test/accuracy"}
    checkpoints.save({"step": 61}, {"accuracy": 0.01})
    assert checkpoints.best_path() != checkpoints.all()[-1]
    checkpoints.save({"step": 62}, {"accuracy": 0.99})
    assert checkpoints.best_path() == checkpoints.all()[-1]


def test_a_folder_that_grows_while_it_is_watched(tmp_path: Path) -> None:
    with Terminal([*STATUS, str(tmp_path), "--watch"]) as terminal:
        terminal.read_until("no run below")
        write_run(tmp_path / "new", state="failed", reason="what went wrong")
        terminal.read_until("new: what went wrong")
        terminal.press_ctrl_c()
        assert terminal.end() == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["missing"], "missing: no such folder; name run directories, or folders with runs below"),
        (["Makefile"], "Makefile: no such folder; name run directories, or folders with runs below"),
        (["docs", "--watch", "--json"], "--watch --json: one is for people, the other for programs; choose one"),
        (["docs", "--", "--lr", "1"], "-- --lr 1: only `plan` takes options of train.py; leave them out"),
    ],
)
def test_refusals(arguments: list[str], line: str) -> None:
    done = run([*STATUS, *arguments], expect=2)
    assert done.stderr == f"evenkeel: {line}\n"
    assert done.stdout == ""


def test_it_does_not_wait_for_torch(tmp_path: Path) -> None:
    code = "import sys, evenkeel.__main__ as m; m.main(); sys.exit('torch' in sys.modules)"
    run([sys.executable, "-c", code, "status", str(tmp_path)])

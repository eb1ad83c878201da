"""`python -m evenkeel status` of what runs have left; of runs at work see tests/processes/test_status.py."""

import io
import json
import random
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenkeel.cli.follow import _Follower
from evenkeel.cli.status import Metrics, Runs, _view, as_json, find, status_of
from evenkeel.common.files import try_lock
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance, read_manifest
from tests.support.components import has
from tests.support.damage import leave_damaged
from tests.support.processes import EVENKEEL, evenkeel, read, run
from tests.support.small_runs import OLD_RUNS, TASK, options, the_line
from tests.support.terminal import Terminal
from tests.support.typed import typed

LONG = 10_000  # steps, so that a run outlives its tests
NO_SLURM = {"PATH": str(Path(sys.executable).parent)}
STATUS = [*EVENKEEL, "status"]


def facts(*arguments: object) -> dict[str, dict[str, Any]]:
    """Folder's name -> what --json says of its run."""
    return {Path(it["run"]).name: it for it in json.loads(typed("status", *arguments, "--json")[1])}


def endless(run_dir: Path) -> list[str]:
    shape = ["--max-steps", LONG, "--epochs", LONG, "--batch-size", 12, "--log-every", 1]
    return options(TASK, run_dir, *shape, "--pause", 0.1, "--eval-every", 2)


def write_run(folder: Path, **facts: Any) -> Path:
    """What a run leaves that has done nothing yet."""
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / "status.json").write_text(json.dumps({"state": "running", "pid": 1, "world_sizes": [1]} | facts))
    return folder


def submitted(run_dir: Path) -> None:
    """Leave the record of Slurm job 17."""
    (run_dir / "slurm").mkdir(parents=True)
    names = {"job_id": "17", "run_dir": str(run_dir), "folder": str(run_dir), "log": str(run_dir / "log")}
    (run_dir / "slurm" / "job.json").write_text(json.dumps(names | {"submitted": 0.0}))


def test_a_run_of_less_than_a_minute_says_so_in_place_of_its_goodput(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    header, *rows = typed("status", OLD_RUNS / "finished")[1].splitlines()
    assert header.endswith("GOODPUT")
    assert rows[0].endswith("<1 min")


def test_random_damage_to_what_a_run_has_written_ends_neither_status_nor_follow(tmp_path: Path) -> None:
    """A few of some thousand that were tried."""
    run_dir, dice = tmp_path / "run", random.Random(1)
    for _ in range(30):
        leave_damaged(run_dir, OLD_RUNS / "finished", dice)
        console = Console(file=io.StringIO(), width=100, force_terminal=True)
        console.print(_view(found := Runs([run_dir]), console))
        json.dumps([as_json(it) for it in found.look()])
        follower = _Follower(run_dir)
        follower.console, follower.begun = console, True
        follower.report(it := status_of(run_dir, follower.metrics))
        console.print(follower.panel(it))


def test_a_run_whose_folder_is_a_link_is_found_and_a_circle_of_links_ends(tmp_path: Path) -> None:
    shutil.copytree(OLD_RUNS / "finished", tmp_path / "scratch" / "run")
    (runs := tmp_path / "runs").mkdir()
    (runs / "linked").symlink_to(tmp_path / "scratch" / "run")
    (runs / "circle").symlink_to(runs)
    assert [*find(runs)] == [runs / "linked"]


def test_follow_goes_on_after_the_clock_was_set_back() -> None:
    follower, run = _Follower(OLD_RUNS / "finished"), status_of(OLD_RUNS / "finished", Metrics(OLD_RUNS / "finished"))
    due = [follower.is_due({"time": time, "step": -1}, run) for time in (7200.0, 7201.0, 3606.0, 3607.0, 3612.0)]
    assert due == [True, False, True, False, True]


def test_a_run_on_another_machine(tmp_path: Path) -> None:
    write_run(tmp_path / "fresh", host="elsewhere", time=time.time() - 30)
    write_run(tmp_path / "old", host="elsewhere", time=time.time() - 3 * 3600)
    write_run(tmp_path / "here", host=socket.gethostname(), time=time.time())
    found = facts(tmp_path)
    assert {name: it["state"] for name, it in found.items()} == {"fresh": "unknown", "old": "lost", "here": "lost"}
    assert found["fresh"]["why"].startswith("it runs on elsewhere, which is not visible from here; last output ")
    assert found["old"]["why"] == "it ran on elsewhere, and has written nothing for 3 h"


def test_a_run_that_has_restarted_says_why(tmp_path: Path) -> None:
    run_dir, killed = write_run(tmp_path / "held", last_failure="no memory", world_sizes=[1, 1]), "rank 1 was killed"
    with (run_dir / ".lock").open("w") as file:
        assert try_lock(file)
        assert facts(tmp_path)["held"]["why"] == "attempt 2 goes on after: no memory"
        start = {"kind": "start", "step": 1, "time": time.time(), "last_end": killed}
        (run_dir / "metrics.jsonl").write_text(json.dumps(start) + "\n")
        assert facts(tmp_path)["held"]["why"] == f"attempt 2 goes on after: {killed}"


def test_without_slurm_a_job_is_unknown_and_the_run_is_not(tmp_path: Path) -> None:
    pytest.importorskip("evenkeel.launch.slurm")
    submitted(write_run(tmp_path / "done", state="finished", step=5, total_steps=5))
    submitted(tmp_path / "waiting")
    done = evenkeel("status", tmp_path, "--json", env=NO_SLURM)
    asked = "Slurm does not answer: squeue: not found: is this a login node of the cluster?"
    assert the_line(done.stderr) == asked
    found = {Path(it["run"]).name: it for it in json.loads(done.stdout)}
    assert {name: it["state"] for name, it in found.items()} == {"done": "finished", "waiting": "unknown"}
    assert found["waiting"]["job"] == {"id": "17", "state": None, "reason": None, "nodes": None, "requeues": None}
    text = evenkeel("status", tmp_path, env=NO_SLURM).stdout
    assert asked in text.splitlines()
    assert re.search(r"waiting +unknown +17 \? +0/\? +0$", text, re.MULTILINE)
    # the launcher of Slurm may be deleted
    code = "import sys, evenkeel.__main__ as m; sys.modules['evenkeel.launch.slurm.jobs'] = None; m.main()"
    without = run([sys.executable, "-c", code, "status", tmp_path / "done", "--json"])
    (it,) = json.loads(without.stdout)
    assert (it["state"], it["job"], without.stderr) == ("finished", None, "")


def test_files_that_are_none_of_a_run(tmp_path: Path) -> None:
    assert evenkeel("status", tmp_path).stdout == f"no run below {tmp_path}\n"
    assert facts(tmp_path) == {}
    (write_run(tmp_path / "cut") / "status.json").write_text('{"state": "run')
    (write_run(tmp_path / "list") / "status.json").write_text("[1]")
    half = '{"kind": "tr\nnull\n{"kind": "x"}\n{'
    (write_run(tmp_path / "torn", state="finished") / "metrics.jsonl").write_text(half)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "status.json").write_text("{}")  # of another program
    write_run(tmp_path / "cut.old-20260102-030405")  # moved aside by --fresh
    (link := tmp_path / "link").symlink_to(tmp_path)
    found = facts(tmp_path, link)
    states = {name: it["state"] for name, it in found.items()}
    assert states == {"cut": "unknown", "list": "unknown", "torn": "finished"}
    assert found["cut"]["why"].startswith("status.json cannot be read: ")


def test_a_run_of_another_version_has_the_names_of_this_one(tmp_path: Path) -> None:
    """Version 0.1.0 wrote bare names, and a run that it began may have been continued."""
    run_dir = shutil.copytree(OLD_RUNS / "finished", tmp_path / "finished")
    metrics = Metrics(run_dir / "metrics.jsonl")
    found = status_of(run_dir, metrics).metrics
    trained = dict.fromkeys((f"train/{name}" for name in ("loss", "grad_norm", "lr", "samples_per_s")), 0.5)
    assert found.keys() == trained.keys() | {"test/loss", "test/accuracy"}
    assert read(run_dir)["metrics"] == {"loss": found["test/loss"], "accuracy": found["test/accuracy"]}, "the control"
    with (run_dir / "metrics.jsonl").open("a") as file:
        now = {"step": 61, "time": time.time()}
        file.write(json.dumps({"kind": "train", "epoch": 4.1} | now | trained) + "\n")
    assert status_of(run_dir, metrics).metrics == found | trained
    # the best checkpoint is told by a metric of old and of new manifests
    old, *_ = (checkpoints := Checkpoints(run_dir / "checkpoints", 9, Provenance(("test/accuracy", "max")))).all()
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
        terminal.read_until("new: failed: ")  # a long path breaks the line somewhere
        terminal.press_ctrl_c()
        assert terminal.end() == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("missing", "missing: no such folder; name run directories, or folders with runs below"),
        ("Makefile", "Makefile: no such folder; name run directories, or folders with runs below"),
        ("docs --watch --json", "--watch --json: a table for people, or JSON for programs; choose one"),
        ("docs -- --lr 1", "-- --lr 1: `status` takes no options of train.py; leave them out"),
    ],
)
def test_refusals(words: str, line: str) -> None:
    assert typed("status", words) == (2, "", f"evenkeel: {line}\n")


@pytest.mark.parametrize("words", ["status RUN", "compare RUN RUN", "checkpoint list RUN"])
def test_commands_that_look_at_runs_do_not_wait_for_torch(words: str) -> None:
    if not has(words.split()[0]):
        pytest.skip("this copy has left out the command")
    arguments = words.replace("RUN", str(OLD_RUNS / "finished")).split()
    code = "import sys, evenkeel.__main__ as m; m.main(); sys.exit('torch' in sys.modules)"
    run([sys.executable, "-c", code, *arguments])

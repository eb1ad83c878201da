"""Ranks that neither die nor work: noticed, named, saved, started again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from evenkeel.hang import Beat, _collectives, describe
from evenkeel.world import World

from . import processes
from .processes import (
    TRAIN,
    finish_all,
    fork,
    fork_ranks,
    read,
    records,
    run,
    running,
    start,
    torchrun,
    wait_until,
    wait_until_gone,
)
from .test_staging import Training
from .test_survival import workers_of
from .test_train import PLAN, SAMPLES, job, wait_for_step


def beat(step: int, phase: str) -> Beat:
    return Beat(1, step, phase, "host", 1)


def test_the_culprit_comes_first() -> None:
    waiting = beat(811, "gradient reduction")
    ranks = {0: waiting, 1: waiting, 2: waiting, 3: beat(811, "data loading")}
    assert (
        describe(ranks, []) == "rank 3 is in data loading of step 812; ranks 0-2 wait in gradient reduction of step 812"
    )
    assert describe(ranks, [3]) == (
        "rank 3 does not answer any more, last seen in data loading of step 812; "
        "ranks 0-2 wait in gradient reduction of step 812"
    )
    frozen = dict.fromkeys([0, 1, 2, 5, 7], waiting)
    assert describe(frozen, [5, 7]).startswith("ranks 5, 7 do not answer any more, last seen in gradient reduction")
    gpu = replace(beat(811, "data loading"), device="cuda:0 (GPU 2)")
    assert describe({0: waiting, 3: gpu}, [3]).startswith("rank 3 (cuda:0 (GPU 2) of host) does not answer any more")


def test_each_backend_s_recorder_is_asked() -> None:
    """What has been recorded is in `test_a_frozen_rank_...`, for gloo, and in `test_gpus`."""
    told = [json.loads(text) for text in _collectives()]
    assert len(told) == 3
    general = torch._C._distributed_c10d._dump_fr_trace_json
    assert ("version" in told[2]) == ("backend" in (general.__doc__ or "")), "nccl2, if this release knows it"
    assert "version" in told[0]


def test_what_explains_a_hang_is_not_waited_for_with_the_save(tmp_path: Path) -> None:
    """torch's own record of collectives may hang as they do: here its file does, before and after the save."""
    training = Training(tmp_path / "run", World(0, 0, 1, 1, torch.device("cpu"), launched=False))
    training.step()
    training.run.watched(None, lambda: None)
    for name in ("collectives.json", "stacks.txt"):
        os.mkfifo(training.run.logs / f"rank-0.{name}")  # whoever opens it waits for a reader
    threading.Thread(target=training.run.hung, args=(training.state,), daemon=True).start()
    wait_until(lambda: read(training.run.path, "status.json")["state"] == "failed", "the end")
    assert training.saved(1)
    assert "no progress for 600 s" in read(training.run.path, "status.json")["reason"]


@pytest.mark.parametrize("own", [None, "7"])
def test_the_monitor_of_nccl_has_more_patience_than_the_watch(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MASTER_PORT", str(processes.free_port()))
    with World(0, 0, 1, 1, torch.device("cpu"), launched=True).connected(timedelta(seconds=1234)):
        assert os.environ[name] == (own or "1234")


RARE = ["--checkpoint-every", 0, "--eval-every", 1000]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fingerprint of the weights of a run that nothing has happened to."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish_all(fork_ranks(2, TRAIN, *job(run_dir, *RARE)))
    return str(read(run_dir)["weights_sha256"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_rank_is_named_and_the_job_goes_on_with_the_same_bits(
    tmp_path: Path, undisturbed: str, victim: int
) -> None:
    run_dir = tmp_path / "run"
    options = job(run_dir, *RARE, "--pause", 0.1, "--hang-timeout", 5)
    process = start(torchrun(2, TRAIN, *options, restarts=1))
    wait_for_step(run_dir, 3, process)
    frozen = workers_of(process)[victim]
    os.kill(frozen, signal.SIGSTOP)
    begun = time.monotonic()
    wait_until_gone([frozen], 5 + 30)  # torchrun alone would take 30 s to be rid of it, once it wanted to
    print(f"noticed, explained, saved and killed after {time.monotonic() - begun:.1f} s")
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stderr.splitlines() if "no progress for 5 s" in line]
    assert f"rank {victim} does not answer any more" in line
    assert f"rank {1 - victim} waits in gradient reduction of step" in line
    logs = run_dir / "logs" / "attempt-0001"
    assert "gradients.py" in (logs / f"rank-{1 - victim}.stacks.txt").read_text()
    assert "gloo:all_reduce" in (logs / f"rank-{1 - victim}.collectives.json").read_text()
    starts = [record["step"] for record in records(run_dir, "start")]
    assert len(starts) == 2
    assert starts[1] >= 3
    steps = [record["step"] for record in records(run_dir, "train")]
    assert sorted(set(steps)) == sorted(steps), "no step is done twice"
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    assert read(run_dir)["weights_sha256"] == undisturbed
    if victim == 1:
        assert read(run_dir)["ledger"]["dead"] > 5, "a hang is not productive"


@pytest.mark.multiprocess
def test_a_rank_that_is_stuck_in_its_data_says_so_itself(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = job(run_dir, "--checkpoint-every", 0, "--hang-timeout", 5, "--stick-at", 20)
    done = run(torchrun(2, TRAIN, *options, restarts=1))
    assert "rank 1 is in data loading of step 4; rank 0 waits in gradient reduction of step 4" in done.stderr
    assert "recording_task.py" in (run_dir / "logs" / "attempt-0001" / "rank-1.stacks.txt").read_text()
    assert [record["step"] for record in records(run_dir, "start")] == [0, 3]
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES


@pytest.mark.multiprocess
def test_the_control_without_a_watch_a_frozen_rank_holds_the_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(torchrun(2, TRAIN, *job(run_dir, "--pause", 0.1, "--hang-timeout", 0), restarts=1))
    wait_for_step(run_dir, 3, process)
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGSTOP)
    time.sleep(12)
    assert all(map(running, workers.values()))
    assert process.poll() is None
    for pid in workers.values():
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


@pytest.mark.multiprocess
def test_a_job_that_was_suspended_does_not_hang(tmp_path: Path) -> None:
    """Ctrl-Z and fg, long after: the clock went on, the job did not."""
    run_dir = tmp_path / "run"
    process = fork(TRAIN, *job(run_dir, "--pause", 0.05, "--hang-timeout", 4))
    wait_for_step(run_dir, 3, process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    assert processes.finish(process).returncode == 0
    assert len(records(run_dir, "start")) == 1
    # which the watch opens at each tick, for a dump without Python's help
    assert not list(run_dir.rglob("*.stacks.txt")), "with nothing in it"

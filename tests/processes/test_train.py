"""train.py from outside: real processes, real signals, real resumes at other world sizes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenkeel.run.checkpoint import STATE
from evenkeel.training.state import sha256
from tests.run.test_checkpoint import seal
from tests.support import processes
from tests.support.processes import (
    TRAIN,
    finish_all,
    fork,
    fork_ranks,
    read,
    records,
    run,
    run_forked,
    running,
    start,
    torchrun,
    wait_until,
)
from tests.support.recording_task import SAMPLES
from tests.support.small_runs import EPOCHS, PLAN, TASK, children, job, trainer_of, wait_for_step


def test_torchrun_restarts_a_killed_rank_by_itself_and_fresh_does_not_start_over_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_forked(TRAIN, *job(run_dir, "--max-steps", 2))  # an older run in the way
    run(torchrun(3, TRAIN, *job(run_dir, "--fresh", "--die-at", 9, "--checkpoint-every", 3), restarts=2))
    starts = records(run_dir, "start")
    assert [record["world_size"] for record in starts] == [3, 3]
    assert starts[1]["step"] >= 6, "the restart continues"
    assert read(run_dir)["restarts"] == 1
    assert read(run_dir)["samples_seen"] == EPOCHS * SAMPLES
    assert len(list(tmp_path.glob("run.old-*"))) == 1


def test_a_finished_run_says_so_and_changes_nothing_and_fresh_moves_it_aside(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [TRAIN, *job(run_dir, "--max-steps", 3)]
    run_forked(*command)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    again = run_forked(*command)
    assert "finished at step 3; --fresh starts over" in again.stdout
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    run_forked(*command, "--fresh")
    (aside,) = tmp_path.glob("run.old-*")
    assert (aside / "model.pt").read_bytes() == before[run_dir / "model.pt"]
    assert read(run_dir)["weights_sha256"] == read(aside)["weights_sha256"], "the same command gives the same weights"


def test_a_run_whose_folder_is_deleted_meanwhile_is_complete_at_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = job(run_dir, "--pause", 0.05, "--checkpoint-every", 5)
    process = fork(TRAIN, *options)
    wait_for_step(run_dir, 6, process)
    shutil.rmtree(run_dir, ignore_errors=True)
    done = processes.checked(processes.finish(process), 0)
    assert f"{run_dir} was deleted while the run is at work" in done.stderr
    assert "finished at step" in run_forked(TRAIN, *options).stdout
    assert read(run_dir)["samples_seen"] == EPOCHS * SAMPLES
    run_forked(TRAIN, *job(run_dir, "--lr", 1), expect=2)


def test_a_state_that_does_not_fit_the_model_ends_in_a_line(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_forked(TRAIN, *job(run_dir, "--max-steps", 2, "--schedule", "constant"))
    (newest,) = (run_dir / "checkpoints").glob("step-*")
    found = torch.load(newest / STATE, weights_only=True)
    found["model"]["0.weight"] = found["model"]["0.weight"][:1]
    torch.save(found, newest / STATE)
    seal(newest)
    ranks = fork_ranks(2, TRAIN, *job(run_dir, "--max-steps", 4, "--schedule", "constant"))
    (line,) = "".join(processes.checked(processes.finish(rank), 1).stderr for rank in ranks).splitlines()
    assert line.startswith(f"evenkeel: {run_dir}: its state of step 2 does not fit this model and its optimizers (")
    assert "size mismatch for 0.weight" in line
    assert newest.exists(), "it is no damage"


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(torchrun(2, TRAIN, *job(run_dir, "--checkpoint-every", 4)))
    summary, status = read(run_dir), read(run_dir, "status.json")
    weights = torch.load(run_dir / "model.pt", weights_only=True)
    assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}, "bare names, no module."
    assert all(tensor.device.type == "cpu" for tensor in weights.values())
    assert summary["weights_sha256"] == sha256(weights)
    assert summary["state"] == status["state"] == "finished"
    assert {"step", "epoch", "samples_seen", "metrics", "restarts", "world_sizes", "seconds"} <= set(summary)
    assert [r["step"] for r in records(run_dir, "train")] == list(range(1, PLAN.total_steps + 1))
    assert [r["step"] for r in records(run_dir, "eval")] == [9, 18, 27]
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000024", "step-00000027"]
    logs = sorted(path.name for path in (run_dir / "logs" / "attempt-0001").iterdir())
    assert logs == ["rank-0.log", "rank-1.log"]


def test_ctrl_c_saves_and_exits_75(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start([sys.executable, str(TRAIN), *job(run_dir, "--pause", 0.1, "--checkpoint-every", 0)])
    wait_for_step(run_dir, 2, process)
    process.send_signal(signal.SIGINT)
    done = processes.finish(process)
    assert done.returncode == 75, done.stderr
    assert "the same command continues" in done.stdout
    step = read(run_dir, "status.json")["step"]
    assert (run_dir / "checkpoints" / f"step-{step:08d}").is_dir()


def loaders_of(process: subprocess.Popen[str]) -> list[int]:
    return [child for child in children(trainer_of(process)) if TASK in Path(f"/proc/{child}/cmdline").read_text()]


def test_loader_processes_mind_only_their_parent(tmp_path: Path) -> None:
    """Slurm signals every process of a step: the loaders must not die before the training process has saved."""
    run_dir = tmp_path / "run"
    process = start([sys.executable, str(TRAIN), *job(run_dir, "--pause", 0.1, "--num-workers", 2)])
    wait_for_step(run_dir, 1, process)
    loaders = loaders_of(process)
    assert len(loaders) == 4, "two for training, two for evaluating"
    for loader in loaders:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(loader, number)
    wait_for_step(run_dir, records(run_dir, "train")[-1]["step"] + 4, process)
    for pid in [*loaders, process.pid]:
        os.kill(pid, signal.SIGUSR2)
    done = processes.finish(process)
    assert done.returncode == 75, done.stderr
    assert read(run_dir, "status.json")["reason"] == "SIGUSR2"


def test_loader_processes_never_outlive_a_killed_parent(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start([sys.executable, str(TRAIN), *job(run_dir, "--pause", 0.1, "--num-workers", 2)])
    wait_for_step(run_dir, 1, process)
    loaders = loaders_of(process)
    assert loaders
    os.kill(trainer_of(process), signal.SIGKILL)
    # by themselves they would look for their parent every 5 s
    wait_until(lambda: not any(map(running, loaders)), "the end of the loaders", limit=4)
    processes.kill_group(process)
    process.communicate()


def test_a_bug_in_the_loss_ends_the_run_at_once_and_keeps_the_last_step(tmp_path: Path) -> None:
    """With loader processes alive, which must not keep the failed process from ending."""
    run_dir = tmp_path / "run"
    more = ["--fail-at", 10, "--num-workers", 2, "--checkpoint-every", 0]
    done = run([sys.executable, str(TRAIN), *job(run_dir, *more)], expect=1)
    assert "ZeroDivisionError: a bug in the user's loss" in done.stderr
    status = read(run_dir, "status.json")
    assert status["state"] == "failed"
    assert status["reason"] == "ZeroDivisionError: a bug in the user's loss"
    assert (run_dir / "checkpoints" / f"step-{status['step']:08d}").is_dir()


def test_two_jobs_cannot_use_one_run_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start([sys.executable, str(TRAIN), *job(run_dir, "--pause", 0.5)])
    try:
        wait_for_step(run_dir, 1, process)
        refused = run([sys.executable, str(TRAIN), *job(run_dir, "--pause", 0.5)], expect=2)
        assert refused.stderr.startswith(f"evenkeel: --run-dir {run_dir}: is in use by process {trainer_of(process)}")
        assert refused.stderr.count("\n") == 1
    finally:
        processes.kill_group(process)
        process.communicate()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it")
def test_more_ranks_than_micro_batches_warns_and_trains(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first, *_ = finish_all(fork_ranks(5, TRAIN, *job(run_dir, "--max-steps", 3)))
    assert "1 of 5 ranks have nothing to do" in first.stderr
    assert read(run_dir)["step"] == 3

"""train.py from outside: real processes, real signals, real resumes at other world sizes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from evenkeel.checkpoint import STATE
from evenkeel.plan import Plan
from evenkeel.state import sha256

from . import processes
from .processes import (
    ROOT,
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
from .recording_task import SAMPLES
from .test_checkpoint import seal

pytestmark = pytest.mark.multiprocess

TASK = f"{ROOT / 'tests' / 'recording_task.py'}:Recorded"
EPOCHS, BATCH, MICRO = 3, 12, 3  # 9 steps an epoch, the last of 5 samples
PLAN = Plan(SAMPLES, BATCH, MICRO, EPOCHS)


def job(run_dir: Path, *more: object) -> list[str]:
    """Options of a small run of the recording task."""
    shape = ["--epochs", EPOCHS, "--batch-size", BATCH, "--micro-batch", MICRO, "--log-every", 1]
    options = ["--task", TASK, "--run-dir", run_dir, "--wandb", "disabled", *shape, *more]
    return [str(option) for option in options]


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until a step stands in the metrics of a run."""
    deadline = time.monotonic() + processes.LIMIT
    while time.monotonic() < deadline:
        if (run_dir / "metrics.jsonl").exists() and any(r["step"] >= step for r in records(run_dir, "train")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError(f"step {step} did not come")


def handed_out(folder: Path, first: int, end: int, world_size: int) -> Counter[tuple[int, int]]:
    """(epoch, sample) -> times handed out, in the steps first .. end of one attempt with its own record folder."""
    counts: Counter[tuple[int, int]] = Counter()
    for rank in range(world_size):
        files = list(folder.glob(f"rank-{rank}-*"))
        indices = [int(line) for file in files for line in file.read_text().split()]
        position = 0
        for step in range(first, end):
            size = sum(m.size for m in PLAN.micro_batches(step, rank, world_size))
            mine = indices[position : position + size]
            assert len(mine) == size, f"rank {rank} was not given its samples of step {step}"
            counts.update((PLAN.locate(step)[0], index) for index in mine)
            position += size
    return counts


def test_killed_and_stopped_and_resumed_at_other_world_sizes_each_sample_comes_exactly_once(tmp_path: Path) -> None:
    """kill -9 of the whole job at a random step on 2 ranks, SIGTERM on 3, the rest on 1 rank without torchrun."""
    run_dir, dice = tmp_path / "run", random.Random()
    folders = [tmp_path / f"attempt-{i}" for i in range(3)]
    for folder in folders:
        folder.mkdir()
    more = ["--checkpoint-every", 2]

    # the record folder differs between attempts, and would be refused as another task: so it goes by a link
    link = tmp_path / "record"

    def attempt(number: int, command: list[str]) -> subprocess.Popen[str]:
        link.unlink(missing_ok=True)
        link.symlink_to(folders[number])
        return start(command)

    options = job(run_dir, *more, "--record", link, "--pause", 0.1)
    killed_at = dice.randrange(3, 9)
    process = attempt(0, torchrun(2, TRAIN, *options))
    wait_for_step(run_dir, killed_at, process)
    wait_until(lambda: newest_checkpoint(run_dir) >= killed_at - 2, "the last checkpoint before it")
    kill_workers_and_agent(process)

    process = attempt(1, torchrun(3, TRAIN, *options))
    wait_for_step(run_dir, killed_at + dice.randrange(3, 9), process)
    process.send_signal(signal.SIGTERM)
    processes.finish(process)
    stopped = read(run_dir, "status.json")
    assert stopped["state"] == "stopped"
    assert stopped["reason"] == "SIGTERM"

    done = processes.finish(attempt(2, [sys.executable, str(TRAIN), *options]))
    assert done.returncode == 0, done.stderr

    starts = [record["step"] for record in records(run_dir, "start")]
    assert starts[0] == 0
    assert killed_at - 2 <= starts[1] <= PLAN.total_steps
    assert starts[2] == stopped["step"], "a stop by signal loses no step"
    ends = [*starts[1:], PLAN.total_steps]
    total: Counter[tuple[int, int]] = Counter()
    for folder, first, end, world_size in zip(folders, starts, ends, (2, 3, 1), strict=True):
        total += handed_out(folder, first, end, world_size)
    assert total == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)})

    summary = read(run_dir)
    assert summary["samples_seen"] == EPOCHS * SAMPLES
    assert summary["step"] == PLAN.total_steps
    assert summary["epoch"] == EPOCHS
    assert summary["restarts"] == 2
    assert summary["world_sizes"] == [2, 3, 1]
    assert_same_as_undisturbed(run_dir, tmp_path / "undisturbed", more)


def newest_checkpoint(run_dir: Path) -> int:
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")), default=0)


def kill_workers_and_agent(process: subprocess.Popen[str]) -> None:
    """SIGKILL a whole job at once: torchrun puts each worker into a session of its own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [*map(int, children), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def assert_same_as_undisturbed(run_dir: Path, other: Path, more: list[object]) -> None:
    """The weights are those of one process that nobody disturbed, up to the order of additions."""
    run_forked(TRAIN, *job(other, *more))
    got, expected = (torch.load(path / "model.pt", weights_only=True) for path in (run_dir, other))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


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


def test_evaluation_is_exactly_the_same_at_any_world_size(tmp_path: Path) -> None:
    """37 test samples in micro-batches of 3: no world size divides anything."""
    run_forked(TRAIN, *job(tmp_path / "start", "--max-steps", 5))
    weights = tmp_path / "start" / "model.pt"
    frozen = ["--lr", 0, "--max-steps", 1, "--init-from", weights]
    results = {}
    for ranks in (1, 2, 3, 4):
        run_dir = tmp_path / str(ranks)
        finish_all(fork_ranks(ranks, TRAIN, *job(run_dir, *frozen)))
        results[ranks] = read(run_dir)["metrics"]
        assert read(run_dir)["weights_sha256"] == read(tmp_path / "start")["weights_sha256"]
    alone = results[1]
    assert all(result == alone for result in results.values()), results
    assert alone == read(tmp_path / "start")["metrics"]


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
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if TASK in Path(f"/proc/{child}/cmdline").read_text()]


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
    process.kill()
    process.wait()
    # by themselves they would look for their parent every 5 s
    wait_until(lambda: not any(map(running, loaders)), "the end of the loaders", limit=4)
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
        assert refused.stderr.startswith(f"evenkeel: --run-dir {run_dir}: is in use by process {process.pid}")
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

"""Each sample exactly once an epoch, in training through kills and in evaluation, at any number of ranks."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.support import small_runs as runs
from tests.support.processes import TRAIN, finish, read, start, torchrun
from tests.support.small_runs import EPOCHS, PLAN, SAMPLES, job, trained, wait_for_step, weights_of


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
    runs.kill_at(killed_at, run_dir, process)
    process = attempt(1, torchrun(3, TRAIN, *options))
    wait_for_step(run_dir, killed_at + dice.randrange(3, 9), process)
    process.send_signal(signal.SIGTERM)
    finish(process)
    stopped = read(run_dir, "status.json")
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGTERM")
    runs.ended(attempt(2, [sys.executable, str(TRAIN), *options]))

    starts = runs.starts(run_dir)
    assert starts[0] == 0
    assert killed_at - 2 <= starts[1] <= PLAN.total_steps
    assert starts[2] == stopped["step"], "a stop by signal loses no step"
    ends = [*starts[1:], PLAN.total_steps]
    total: Counter[tuple[int, int]] = Counter()
    for folder, first, end, world_size in zip(folders, starts, ends, (2, 3, 1), strict=True):
        total += handed_out(folder, first, end, world_size)
    assert total == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)})

    summary = read(run_dir)
    assert (summary["step"], summary["epoch"]) == (PLAN.total_steps, EPOCHS)
    assert (summary["samples_seen"], summary["restarts"]) == (EPOCHS * SAMPLES, 2)
    assert summary["world_sizes"] == [2, 3, 1]

    # the weights are those of one process that nobody disturbed, up to the order of additions
    trained(0, job(tmp_path / "undisturbed", *more))
    got, expected = (torch.load(path / "model.pt", weights_only=True) for path in (run_dir, tmp_path / "undisturbed"))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def test_evaluation_is_exactly_the_same_at_any_world_size(tmp_path: Path) -> None:
    """37 test samples in micro-batches of 3: no world size divides anything."""
    trained(0, job(tmp_path / "start", "--max-steps", 5))
    weights = tmp_path / "start" / "model.pt"
    frozen = ["--lr", 0, "--max-steps", 1, "--init-from", weights]
    results = {}
    for ranks in (1, 2, 3, 4):
        run_dir = tmp_path / str(ranks)
        trained(ranks, job(run_dir, *frozen))
        results[ranks] = read(run_dir)["metrics"]
        assert weights_of(run_dir) == weights_of(tmp_path / "start")
    alone = results[1]
    assert all(result == alone for result in results.values()), results
    assert alone == read(tmp_path / "start")["metrics"]

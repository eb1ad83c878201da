"""Each sample exactly once an epoch, in training through kills and in evaluation, at any number of ranks."""

import random
import signal
from pathlib import Path

import torch

from tests.support import small_runs as runs
from tests.support.processes import TRAIN, read, start, torchrun
from tests.support.small_runs import (
    EPOCHS,
    PLAN,
    SAMPLES,
    Records,
    each_once,
    interrupt,
    job,
    model_of,
    trained,
    weights_of,
)


def test_killed_and_stopped_and_resumed_at_other_world_sizes_each_sample_comes_exactly_once(tmp_path: Path) -> None:
    """kill -9 of the whole job at a random step on 2 ranks, SIGTERM on 3, the rest on 1 rank without torchrun."""
    run_dir, dice = tmp_path / "run", random.Random()
    more, record = ["--checkpoint-every", 2], Records(tmp_path / "record")

    options = job(run_dir, *more, "--record", record.link, "--pause", 0.1)
    killed_at = dice.randrange(3, 9)
    record.of_another_attempt()
    runs.kill_at(killed_at, run_dir, start(torchrun(2, TRAIN, *options)))
    record.of_another_attempt()
    interrupt(3, run_dir, options, killed_at + dice.randrange(3, 9), signal.SIGTERM)
    stopped = read(run_dir, "status.json")
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGTERM")
    record.of_another_attempt()
    trained(0, options)

    starts = runs.starts(run_dir)
    assert starts[0] == 0
    assert killed_at - 2 <= starts[1] <= PLAN.total_steps
    assert starts[2] == stopped["step"], "a stop by signal loses no step"
    assert record.handed_out(PLAN, run_dir, (2, 3, 1)) == each_once(EPOCHS, SAMPLES)

    summary = read(run_dir)
    assert (summary["step"], summary["epoch"]) == (PLAN.total_steps, EPOCHS)
    assert (summary["samples_seen"], summary["restarts"]) == (EPOCHS * SAMPLES, 2)
    assert summary["world_sizes"] == [2, 3, 1]

    # the weights are those of one process that nobody disturbed, up to the order of additions
    trained(0, job(tmp_path / "undisturbed", *more))
    got, expected = (model_of(path) for path in (run_dir, tmp_path / "undisturbed"))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def test_evaluation_is_exactly_the_same_at_any_world_size(tmp_path: Path) -> None:
    trained(0, job(tmp_path / "start", "--max-steps", 5))
    weights = tmp_path / "start" / "model.pt"
    frozen = ["--lr", 0, "--max-steps", 1, "--init-from", weights]
    for ranks in (1, 2, 3, 4):
        run_dir = tmp_path / str(ranks)
        trained(ranks, job(run_dir, *frozen))
        assert weights_of(run_dir) == weights_of(tmp_path / "start")
        assert read(run_dir)["metrics"] == read(tmp_path / "start")["metrics"], ranks

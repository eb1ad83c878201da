"""BatchNorm over the global batch: as plain BatchNorm on one process that computes the batch at once."""

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import Tensor

from tests.support import small_runs as runs
from tests.support.processes import TRAIN, checked, finish, fork_ranks, kill_group, read
from tests.support.small_runs import interrupt, model_of, recipe_job, results_of, the_line, trained, weights_of


def test_all_kinds_of_layers_agree_with_plain_ones(tmp_path: Path) -> None:
    """Outputs, all gradients and running statistics, on three ranks and an idle one, relative to float64."""
    found = results_of(4, "sync_batchnorm_worker.py", tmp_path)
    assert len(found) == 11 + bool(find_spec("evenkeel.tasks.segment"))  # a copy may have left that out
    for name, distances in found.items():
        # what float32 has of numbers around 1e4, and what bfloat16 has of any
        limit = {"bfloat16": 2e-2, "large mean": 2e-3, "float64": 1e-12}.get(name, 1e-5)
        assert max(distances.values()) < limit, (name, distances)
        assert "gradient of x" in distances
        assert ("running_var" in distances) == (name != "without statistics")


@pytest.mark.slow
def test_a_run_is_that_of_one_process_with_the_whole_batch_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Three micro-batches and idle ranks; in the last step of an epoch two micro-batches, one of a single sample."""
    # a plain SGD, because Adam divides by the size of gradients that are only rounding errors
    recipe = ["--dropout", 0, "--clip-norm", 1, "--optimizer", "sgd", "--lr", 0.05, "--reduce", "tree"]
    plain, control = tmp_path / "plain", tmp_path / "control"
    trained(0, recipe_job(plain, *recipe, "--micro-batch", 12))
    trained(0, recipe_job(control, *recipe, "--micro-batch", 3))
    sync = [*recipe, "--micro-batch", 4, "--sync-batchnorm", "--checkpoint-every", 4]
    trained(3, recipe_job(tmp_path / "3", *sync))

    # stopped and killed on the way, and refused on too few ranks
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    options = recipe_job(run_dir, *sync, "--slow", slow)
    for ranks, number in ((4, signal.SIGKILL), (3, signal.SIGTERM)):
        interrupt(ranks, run_dir, options, runs.told_step(run_dir) + 3, number, victims=1, slow=slow)
    first, second = fork_ranks(2, TRAIN, *options)
    refused = checked(finish(first), 2)
    kill_group(second)  # which leaves the speaking to the first, and waits for torchrun to end it
    assert "needs its own rank, but there are only 2; start 3 ranks" in the_line(refused.stderr)
    trained(5, options)
    assert read(run_dir)["world_sizes"] == [4, 3, 5]
    assert weights_of(run_dir) == weights_of(tmp_path / "3")

    expected = model_of(plain)
    for folder, close in ((run_dir, True), (control, False)):
        got = model_of(folder)
        assert got.keys() == expected.keys()
        furthest = max(distance(got[name], expected[name]) for name in got)
        assert (furthest < 1e-4) == close, (folder.name, furthest)


def distance(got: Tensor, expected: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((got.double() - expected.double()).norm() / max(float(expected.double().norm()), 1e-6))

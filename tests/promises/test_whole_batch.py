"""A loss over all samples of a step: the same bits on any number of ranks, and through a kill between its passes."""

import signal
from pathlib import Path

import pytest
import torch

from tests.support import needs
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, checked, finish, finish_all, fork_ranks, records, start, torchrun
from tests.support.small_runs import interrupt, job_of, model_of, restarts_of, steps_of, stop_at, trained, weights_of

SHAPE = "--epochs 4 --batch-size 20 --micro-batch 3 --log-every 1 --checkpoint-every 100"
"""12 steps of 20 samples: micro-batches of 3, the last of 2, and more than two ranks can share evenly."""
job = job_of("whole_batch_task.py:Contrast", SHAPE)


@pytest.mark.slow
def test_the_bits_are_the_same_on_any_ranks_through_a_kill_between_the_passes_and_a_resize(tmp_path: Path) -> None:
    """Three ranks, of which one dies in its step 4 and starts again; stopped; two ranks; stopped; finished on one."""
    plain = fork_ranks(0, TRAIN, *job(tmp_path / "plain", "--reduce", "tree", "--ema", 0.9, "--clip-norm", 1))
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    words = job(run_dir, "--reduce", "tree", "--ema", 0.9, "--clip-norm", 1, "--slow", slow, "--die", "1:3")
    slow.touch()
    first = start(torchrun(3, TRAIN, *words, restarts=1))
    stop_at(run_dir, 5, first)
    interrupt(2, run_dir, words, 8, signal.SIGTERM)
    slow.unlink()
    trained(1, words)
    finish_all(plain)
    assert Path(f"{slow}.died").exists()
    assert restarts_of(run_dir) == (2, 1), "the two starts after it, and that in place"
    assert steps_of(run_dir) == list(range(1, 13)), "no step is lost or done twice"
    assert weights_of(run_dir) == weights_of(tmp_path / "plain")
    lines = records(run_dir, "train")
    for one, other in zip(lines, records(tmp_path / "plain", "train"), strict=True):
        assert {name: one[name] for name in TOLD} == {name: other[name] for name in TOLD}, "to the last digit"
    for epoch in range(4):  # three steps, and each sample once
        assert sum(line["train/labels"] for line in lines[3 * epoch : 3 * epoch + 3]) / 3 == pytest.approx(1)


TOLD = ["train/loss", "train/labels", "train/kept", "train/grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "worlds"),
    [
        pytest.param(["--micro-batch", 8, "--precision", "bf16"], (0, 4), marks=pytest.mark.long),  # one is idle
        (["--micro-batch", 5, "--precision", "fp16", "--model-parallel", 2], (0, 3)),
        needs.long(["--micro-batch", 5, "--sync-batchnorm", "--num-workers", 1], (4, 5)),
    ],
    ids=["bf16", "fp16", "sync-batchnorm"],
)
def test_with_other_options_the_bits_are_the_same_too(tmp_path: Path, options: list, worlds: list[int]) -> None:
    for ranks in worlds:
        trained(ranks, job(tmp_path / str(ranks), "--reduce", "tree", "--epochs", 2, *options))
    one, other = (weights_of(tmp_path / str(ranks)) for ranks in worlds)
    assert one == other


def test_without_metrics_the_evaluation_has_the_same_loss_on_any_ranks(tmp_path: Path) -> None:
    """Three batches of four of the ten test samples, the last of two; micro-batches of three cut across them."""
    words = ["--reduce", "tree", "--batch-size", 4, "--max-steps", 2]
    for ranks in (0, 3):
        trained(ranks, job(tmp_path / str(ranks), *words, task="Plain"))
    one, three = (records(tmp_path / str(ranks), "eval")[-1] for ranks in (0, 3))
    names = {name for name in one if name.startswith("test/")}
    assert {"test/loss", "test/kept", "test/labels"} <= names
    assert {name: one[name] for name in names} == {name: three[name] for name in names}, "to the last digit"


def test_ranks_with_other_embeddings_end_in_a_line(tmp_path: Path) -> None:
    """Before anything of another shape is exchanged."""
    first, second = fork_ranks(2, TRAIN, *job(tmp_path / "run", "--die", "1:other rows"))
    line = runs.the_line(checked(finish(first), 1).stderr)
    assert line.startswith(
        "embed() returned rows of a [8] float32, b [8] float32, label [] int64 for one batch and of "
    )
    assert line.endswith("it must return the same names, dtypes and shapes for all")
    assert checked(finish(second), 1).stderr.count("embed()") == 0, "one rank says it"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Contrast", "Gathered"])
def test_with_the_ring_it_is_nearly_the_same_and_the_control_all_gather_is_not(tmp_path: Path, task: str) -> None:
    """Micro-batches of 5, so that also the control's ranks have equally many: 4, 2 and 1."""
    words = ["--micro-batch", 5, "--optimizer", "sgd", "--lr", 0.05]
    for ranks in (1, 2, 4):
        trained(ranks, job(tmp_path / str(ranks), *words, task=task))
    models = [model_of(tmp_path / str(ranks)).values() for ranks in (1, 2, 4)]
    one, two, four = (torch.cat([tensor.flatten().double() for tensor in model]) for model in models)
    off = [float((other - one).norm() / one.norm()) for other in (two, four)]
    assert (max(off) < 1e-5) if task == "Contrast" else (min(off) > 1e-2), off

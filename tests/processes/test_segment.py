"""The task `segment`: two networks and two optimizers in one step, and everything that is promised holds for them."""

from pathlib import Path

import torch

from evenkeel.tasks.segment import CLASSES, Segment
from tests.support.processes import read
from tests.support.small_runs import options, trained


def test_it_learns(tmp_path: Path) -> None:
    small = ["--backbone", "small", "--canvas", 32, "--digit-size", 24, "--discriminator-width", 4, "--reduce", "tree"]
    shape = ["--samples", 400, "--test-samples", 60, "--batch-size", 8, "--micro-batch", 4, "--epochs", 4]
    trained(2, options("segment", tmp_path, *small, *shape))
    data = Segment(canvas=32, digit_size=24, test_samples=60).test_dataset()
    background = float(torch.stack([(data[i][1] == 0).double().mean() for i in range(60)]).mean())
    metrics = read(tmp_path)["metrics"]
    assert metrics["test/miou"] > 2 * background / CLASSES
    assert metrics["test/pixel_accuracy"] > background

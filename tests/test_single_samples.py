"""A micro-batch of one sample and BatchNorm: refused before the start, but only where it would fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel.classify import Classify
from evenkeel.config import Config
from evenkeel.errors import EndedHere, Refusal
from evenkeel.freezing import freeze
from evenkeel.mistakes import explain
from evenkeel.plan import Plan
from evenkeel.segment import Segment
from evenkeel.single_samples import refuse_single_samples, single
from evenkeel.world import World

from .processes import TRAIN, run_forked

ALONE = World(0, 0, 1, 1, torch.device("cpu"), launched=False)
TINY = Classify(dataset="fake", model_="shufflenet_v2_x0_5", image_size=32)


@pytest.mark.parametrize(
    ("samples", "batch", "micro", "expected"),
    [
        (96, 8, 4, None),
        (97, 8, 4, 12),
        (101, 8, 4, 12),
        (98, 8, 4, None),
        (96, 9, 4, 0),
        (96, 8, 1, 0),
        (9, 9, 8, 0),
    ],
)
def test_which_step_has_a_single_sample(samples: int, batch: int, micro: int, expected: int | None) -> None:
    assert single(Plan(samples, batch, micro, epochs=2)) == expected


def test_steps_that_are_not_reached_gpus_and_common_statistics() -> None:
    plan = Plan(97, 8, 4, epochs=2)
    assert single(Plan(97, 8, 4, epochs=2, max_steps=12)) is None
    assert single(Plan(96, 8, 8, epochs=1), gpus=4) is None
    assert single(Plan(93, 8, 8, epochs=1), gpus=2) is None
    assert single(Plan(93, 8, 8, epochs=1), gpus=4) == 11, "2, 2 and 1"
    assert single(Plan(101, 8, 4, epochs=2), together=True) is None, "five samples"
    assert single(plan, together=True) == 12


def refusal(batch: int, micro: Any, samples: int, task: Classify = TINY, model: nn.Module | None = None) -> str:
    """What is said of a cut; empty if it is let in."""
    config = Config(batch_size=batch, micro_batch=micro).resolved()
    try:
        refuse_single_samples(config, task, model or task.model(), Plan.of(config, samples), ALONE)
    except Refusal as refused:
        return str(refused)
    return ""


def test_the_refusal_names_sizes_that_do() -> None:
    assert refusal(8, 4, 101) == (
        "--batch-size 8 --micro-batch 4: the last step of an epoch has 5 samples, of which a micro-batch gets only one,"
        " and the model's BatchNorm cannot be trained on that; --micro-batch 3 leaves no single sample"
    )
    assert refusal(8, 3, 101) == ""
    assert refusal(8, 4, 97).endswith("; --batch-size 7 --micro-batch 4 leaves no single sample")
    assert refusal(7, 4, 97) == ""
    assert refusal(8, "auto", 97).endswith("; --batch-size 7 leaves no single sample")


def test_only_what_would_fail_is_refused() -> None:
    large = Classify(dataset="fake", model_="shufflenet_v2_x0_5", image_size=64)
    assert refusal(8, 4, 101, large) == "", "its last layer sees two by two pixels"
    images = torch.zeros(1, 3, 64, 64)
    assert large.model()(images).shape == (1, 10)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        TINY.model()(images[:, :, :32, :32])
    assert refusal(8, 4, 101, Classify()) == "", "no BatchNorm"
    assert Segment(backbone="small").takes_one_sample(nn.BatchNorm1d(1)), "a task that sees to it, or says nothing"
    frozen = TINY.model()
    freeze(frozen, ["conv1", "stage*", "conv5"])
    assert refusal(8, 4, 101, TINY, frozen) == ""
    # of a task that does not know, it is said when it happens
    with pytest.raises(EndedHere, match=r"too few samples for BatchNorm in training .*--micro-batch, one that leaves"):
        explain(caught.value, frozen)


@pytest.mark.multiprocess
def test_a_job_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    options = ["--dataset", "fake", "--fake-samples", 101, "--image-size", 32, "--model", "shufflenet_v2_x0_5"]
    cut = ["--batch-size", 8, "--micro-batch", 4, "--run-dir", tmp_path / "run"]
    (line,) = run_forked(TRAIN, *options, *cut, expect=2).stderr.splitlines()
    assert line.endswith("--micro-batch 3 leaves no single sample")
    assert not (tmp_path / "run").exists()

"""The default cut of a step, decided once and recorded; and cuts into single samples, refused where they would fail."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel.common.arguments import LARGEST_WORLD
from evenkeel.common.errors import EndedHere, Refusal
from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.launch.topology import Topology, torchrun
from evenkeel.run.earlier_run import recorded_options
from evenkeel.tasks.classify import Classify
from evenkeel.training.checks import raise_explained
from evenkeel.training.cut import (
    decide_cut,
    fact_of_the_job,
    has_batchnorm,
    refuse_single_samples,
    single,
    takes_one_sample,
)
from evenkeel.training.freezing import freeze
from tests.support.components import optional
from tests.support.processes import TRAIN


def cut(
    world_size: int, recorded: dict[str, Any] | None = None, batchnorm: bool = False, **options: Any
) -> tuple[object, int]:
    """(--micro-batch, --micro-batches) of what is settled."""
    config = decide_cut(Config(batch_size=64, **options), world_size, lambda: batchnorm, recorded or {})
    return config.micro_batch, config.micro_batches


RECORDED = {"micro_batch": 16, "micro_batches": 4}
SIZE = {"micro_batch": 8}  # typed, or of an older version, which wrote the size that it took by default


@pytest.mark.parametrize(
    ("ranks", "recorded", "options", "expected"),
    [
        *((ranks, {}, {}, (0, ranks)) for ranks in (1, 2, 3, 8)),  # a new run has a micro-batch for each rank
        (100, {}, {}, (0, 64)),  # there are no more samples
        (64, {}, {"batchnorm": True}, (0, 32)),  # which has no statistics of one sample
        (32, {}, {"batchnorm": True}, (0, 32)),
        (8, {}, {"strategy": "dp"}, (0, 1)),  # DataParallel divides it
        *((ranks, {}, {"reduce": "tree"}, (8, 0)) for ranks in (1, 2, 3, 8, 64)),  # a fact of the job
        *((ranks, RECORDED, {}, (0, 4)) for ranks in (1, 3, 4)),
        (5, RECORDED, {}, (0, 5)),  # a recorded cut stays unless ranks would be idle
        (5, RECORDED, {"strict_bits": True}, (0, 4)),
        (5, RECORDED, {"sync_batchnorm": True}, (0, 4)),
        (5, RECORDED, {"reduce": "tree"}, (0, 4)),
        (64, {"micro_batch": 2, "micro_batches": 32}, {"batchnorm": True}, (0, 32)),  # a pair of samples for each
        *((ranks, SIZE, {}, (8, 0)) for ranks in (1, 8, 64)),
        *((ranks, SIZE | {"micro_batches": 0}, {}, (8, 0)) for ranks in (1, 8, 64)),
    ],
)
def test_settled_cuts(ranks: int, recorded: dict[str, Any], options: dict[str, Any], expected: tuple[int, int]) -> None:
    assert cut(ranks, recorded, **options) == expected


def test_what_is_typed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGEST_WORLD, "8")
    assert cut(2, RECORDED, micro_batch=5) == (5, 0)
    assert cut(2, RECORDED, micro_batches=5) == (0, 5)
    assert cut(2, RECORDED, micro_batch="auto") == ("auto", 0)
    assert fact_of_the_job(Config(batch_size=64, micro_batch=5)).micro_batch == 5
    assert fact_of_the_job(Config(batch_size=5)).micro_batch == 1


def test_the_largest_world_of_an_elastic_job_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGEST_WORLD, "8")
    assert [cut(ranks) for ranks in (2, 3, 4, 8, 16)] == [(0, 8), (0, 9), (0, 8), (0, 8), (0, 16)]
    assert cut(2, sync_batchnorm=True) == (0, 2), "its micro-batches need a rank each"


def test_launchers_tell_the_largest_world(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenkeel.common.network import Link

    monkeypatch.delenv(LARGEST_WORLD, raising=False)
    for nodes, expected in (((1, 1), None), ((2, 2), None), ((1, 3), "6")):
        topology = Topology(2, *nodes, master_host="127.0.0.1" if nodes[1] > 1 else "")
        assert torchrun(topology, Link(""), TRAIN, []).env.get(LARGEST_WORLD) == expected


def test_where_it_is_recorded(tmp_path: Path) -> None:
    assert recorded_options(tmp_path) == {} == recorded_options(None)
    (tmp_path / "config.toml").write_text("micro_batch = 12\nepochs = 3\n")
    assert recorded_options(tmp_path) == {"micro_batch": 12}, "of an older version, or without its status"
    status = {"micro_batch": 32, "micro_batches": 2, "threads": 4, "step": 5}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert recorded_options(tmp_path) == {"micro_batch": 32, "micro_batches": 2, "threads": 4}


def test_which_models_have_batchnorm() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert has_batchnorm(model)
    assert not has_batchnorm(model[0])
    assert not has_batchnorm(model.eval()), "frozen"


ALONE = World(0, 0, 1, 1, torch.device("cpu"), launched=False)
TINY = Classify(dataset="fake", model_="shufflenet_v2_x0_5", image_size=32)


@pytest.mark.parametrize(
    ("samples", "batch", "micro", "expected"),
    [(96, 8, 4, None), (97, 8, 4, 12), (101, 8, 4, 12), (98, 8, 4, None), (96, 9, 4, 0), (96, 8, 1, 0), (9, 9, 8, 0)],
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


def test_the_refusal_names_sizes_that_do() -> None:
    assert refusal(8, 4, 101) == (
        "--batch-size 8 --micro-batch 4: the last step of an epoch has 5 samples, of which a micro-batch gets only one,"
        " and the model's BatchNorm cannot train on one sample; --micro-batch 3 leaves no single sample"
    )
    assert refusal(8, 3, 101) == ""
    assert refusal(8, 4, 97).endswith("; --batch-size 7 --micro-batch 4 leaves no single sample")
    assert refusal(7, 4, 97) == ""
    assert refusal(8, "auto", 97).endswith("; --batch-size 7 leaves no single sample")


def refusal(batch: int, micro: Any, samples: int, task: Classify = TINY, model: nn.Module | None = None) -> str:
    """What is said of a cut; empty if it is let in."""
    config = Config(batch_size=batch, micro_batch=micro).resolved()
    try:
        plan, data = Plan.of(config, samples), task.train_dataset()
        refuse_single_samples(config, task.loss, model or task.model(), plan, ALONE, data)
    except Refusal as refused:
        return str(refused)
    return ""


def test_only_what_would_fail_is_refused() -> None:
    large = Classify(dataset="fake", model_="shufflenet_v2_x0_5", image_size=64)
    assert refusal(8, 4, 101, large) == "", "its last layer sees two by two pixels"
    images = torch.zeros(1, 3, 64, 64)
    assert large.model()(images).shape == (1, 10)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        TINY.model()(images[:, :, :32, :32])
    assert refusal(8, 4, 101, Classify()) == "", "no BatchNorm"
    for task in optional("tasks.segment.Segment"):
        assert refusal(8, 4, 101, task(backbone="small", canvas=32, digit_size=16, samples=8)) == "", "it sees to it"
    frozen = TINY.model()
    freeze(frozen, ["conv1", "stage*", "conv5"])
    assert refusal(8, 4, 101, TINY, frozen) == ""
    # of a task that does not know, it is said when it happens
    with pytest.raises(EndedHere, match=r"too few samples for BatchNorm in training .*--micro-batch, one that leaves"):
        raise_explained(caught.value, frozen)


SMALL = nn.ModuleDict({"made": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "told": nn.Linear(4, 1)})
LOSSES: dict[str, tuple[bool, Any]] = {
    "alone": (False, lambda model, x: model["told"](model["made"](x)).mean()),
    "two batches joined": (True, lambda model, x: model["told"](model["made"](torch.cat([x, -x]))).mean()),
    "noise of its own": (True, lambda model, x: model["told"](model["made"](torch.randn(8, 3))).mean() + 0 * x.sum()),
    "the other network": (True, lambda model, x: model["told"](torch.cat([x, x[:, :1]], 1)).mean()),
    "another error": (True, lambda model, x: model["none"](x)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_whether_a_loss_of_several_networks_takes_one_sample_is_tried_without_a_trace(name: str) -> None:
    takes, loss = LOSSES[name]
    before, drawn = copy.deepcopy(SMALL.state_dict()), torch.get_rng_state()
    dataset = [torch.randn(3, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert takes_one_sample(Config(), loss, SMALL, dataset) == takes
    assert all(tensor.equal(before[key]) for key, tensor in SMALL.state_dict().items())
    assert torch.get_rng_state().equal(drawn)
    assert all(parameter.grad is None for parameter in SMALL.parameters())

"""What --shard on refuses, each in a line before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.training.task import Task
from tests.support.raised import refusal_of

sharding = pytest.importorskip("evenkeel.training.sharding", reason="--shard on needs torch 2.9", exc_type=ImportError)


class Model(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor: ...  # type: ignore[empty-body]


class Usual(Task):
    """Two blocks, and a layer around them."""

    def model(self) -> nn.Module:
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        return Model({"first": nn.Linear(4, 4), "blocks": blocks})

    def train_dataset(self) -> Any: ...
    def test_dataset(self) -> Any: ...
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor: ...  # type: ignore[empty-body]


class Parts(Usual):
    def model(self) -> nn.Module:
        return nn.ModuleDict(super().model().items())


def odd(name: str, **more: Any) -> Task:
    made: Task = type(name, (Usual,), more)()
    return made


UNSUPPORTED = "which it does not support; leave one out"


def refused(task: Task, change: Callable[[Any], object] = lambda _: None, optimizer: Any = torch.optim.AdamW) -> str:
    model = task.model()
    change(model)
    said = refusal_of(sharding.refuse_unshardable, task, model, [optimizer(model.parameters(), lr=0.1)])
    return said.removeprefix("--shard: ")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (odd("Unused", unused_parameters=True), "an Unused says that parameters may get no gradient; leave it out"),
        (odd("WholeBatches", batch_loss=id), f"a WholeBatches defines batch_loss(), {UNSUPPORTED}"),
        (Parts(), "a ModuleDict has no forward(); write one, and call the module in loss()"),
        (odd("Refreshed", refresh=id), f"a Refreshed defines refresh(), {UNSUPPORTED}"),
    ],
)
def test_a_task(task: Task, line: str) -> None:
    assert refused(task) == line


def tie(model: Any) -> None:
    model["blocks"][1][0].weight = model["blocks"][0][0].weight


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda it: it.update({"norm": nn.BatchNorm1d(4)}), "the model has BatchNorm, which it does not"),
        (lambda it: it["blocks"].pop(1), "a Model has no repeated blocks in an "),
        (lambda it: it.register_parameter("scale", nn.Parameter(torch.ones(()))), "scale is a number without rows"),
        (lambda it: it.register_parameter("w", nn.Parameter(torch.ones(4, 3).t())), "w is not contiguous in memory"),
        (lambda it: it.register_parameter("w", nn.Parameter(torch.ones(0, 3))), "w has no elements; leave it out"),
        (lambda it: it["first"].weight.register_hook(torch.abs), "first.weight has a hook, which would not be called;"),
        (
            lambda it: setattr(it["first"], "bias", nn.Parameter(torch.ones(4).half())),
            "first.weight is torch.float32 and first.bias torch.float16; use one type in each block",
        ),
        (tie, "blocks.0.0.weight and blocks.1.0.weight are one tensor, in different blocks; untie them"),
    ],
)
def test_a_model(change: Callable[[Any], object], line: str) -> None:
    assert refused(Usual(), change).startswith(line)


def test_an_optimizer() -> None:
    assert refused(Usual(), optimizer=torch.optim.Adamax).startswith("an Adamax is not known to compute each element")
    rate = "the learning rate of an AdamW is a tensor; make it a number"
    assert refused(Usual(), optimizer=lambda it, lr: torch.optim.AdamW(it, lr=torch.tensor(lr))) == rate


def test_an_ordinary_model_is_not_refused() -> None:
    model = Usual().model()
    sharding.refuse_unshardable(Usual(), model, [torch.optim.SGD(model.parameters(), lr=0.1)])

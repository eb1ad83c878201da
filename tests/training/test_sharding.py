"""What --shard on refuses, each in a line before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.common.errors import Refusal
from evenkeel.training.sharding import refuse_unshardable
from evenkeel.training.task import Task


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
        return nn.ModuleDict(super().model().items())  # type: ignore[operator]


class Unused(Usual):
    unused_parameters = True


class WholeBatches(Usual):
    def batch_loss(self, embedded: Any) -> Tensor: ...  # type: ignore[empty-body]


class Refreshed(Usual):
    def refresh(self, model: nn.Module, epoch: int) -> Any: ...


def refused(task: Task, change: Callable[[Any], object] = lambda _: None, optimizer: Any = torch.optim.AdamW) -> str:
    model = task.model()
    change(model)
    optimizers = [optimizer(model.parameters(), lr=0.1)]
    with pytest.raises(Refusal) as caught:
        refuse_unshardable(task, model, optimizers)
    return str(caught.value).removeprefix("--shard: ")


def test_an_ordinary_model_is_not_refused() -> None:
    model = Usual().model()
    refuse_unshardable(Usual(), model, [torch.optim.SGD(model.parameters(), lr=0.1)])


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (Unused(), "an Unused says that parameters may get no gradient; leave it out"),
        (WholeBatches(), "a WholeBatches defines batch_loss(), which it does not support; leave one out"),
        (Parts(), "a ModuleDict has no forward(); write one, and call the module in loss()"),
        (Refreshed(), "a Refreshed defines refresh(), which it does not support; leave one out"),
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

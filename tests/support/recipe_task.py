"""A small task with BatchNorm and dropout, whose evaluation can be made to wait and never gets better."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from evenkeel.common.phases import activity
from evenkeel.data.dataset import InMemory
from evenkeel.training.task import Task

SAMPLES = 101
STEPS = 27
"""Of a run by `small_runs.recipe_job`."""


@dataclass
class Recipe(Task):
    """Linear regression on noise."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("score", "max")

    slow: str = ""
    """While this file exists, a micro-batch takes 0.2 s."""
    hold: str = ""
    """While this file exists, an evaluation after a step says so by another, of its name with .waiting, and waits."""
    dropout: float = 0.2
    operation: str = ""
    """put: the loss uses an operation that has no deterministic algorithm."""

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(0)
        return InMemory(torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES) / SAMPLES)

    def test_dataset(self) -> InMemory:
        return InMemory(torch.randn(37, 4, generator=torch.Generator().manual_seed(1)), torch.arange(37) / 37)

    def model(self) -> nn.Module:
        layers: list[Any] = [
            nn.Linear(4, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(16, 1),
        ]
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.2)
        features, target = batch
        if self.operation == "put":
            features.put_(torch.tensor([0]), torch.tensor([0.0]))
        return (model(features).squeeze(1) - target).square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        while self.hold and activity.step and Path(self.hold).exists():
            Path(f"{self.hold}.waiting").touch()
            time.sleep(0.01)
        features, target = batch
        error = (model(features).squeeze(1).float() - target).square()
        return {"loss": error, "score": torch.ones_like(error)}


@dataclass
class Parts(Recipe):
    """With parts of its loss. The mean of the targets does not depend on the weights, so a test can know it."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return loss, {"target": batch[1].mean(), "same": loss, "noisy/half": 0.5}


def scheduler(kind: str, optimizer: Optimizer, steps: int) -> LRScheduler:
    """One whose rate depends on what has been so far."""
    if kind == "onecycle":
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps)
    if kind == "plateau":  # the score never gets better
        return lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=1)
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, steps - 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


def bare_rates(kind: str) -> list[float]:
    """The rate of each step of a plain loop that evaluates after every third step."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.002)
    made: Any = scheduler(kind, optimizer, STEPS)
    rates = []
    for step in range(1, STEPS + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if kind == "plateau" and step % 3 == 0:
            made.step(1.0)
        elif kind != "plateau":
            made.step()
    return rates


@dataclass
class Scheduled(Recipe):
    """By a scheduler of torch's."""

    kind: str = "onecycle"

    def schedulers(self, optimizers: list[Optimizer], config: Any) -> list[LRScheduler]:
        return [scheduler(self.kind, optimizers[0], config.max_steps)]


@dataclass
class Outside(Recipe):
    """The control: the same rates from a scheduler that is not part of the committed state."""

    kind: str = "onecycle"

    def rates(self, config: Any, step: int, total_steps: int) -> float:
        if not hasattr(self, "made"):
            self.optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
            self.made = scheduler(self.kind, self.optimizer, total_steps)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.made.step()
        return rate / config.lr

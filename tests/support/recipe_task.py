"""A small task with BatchNorm and dropout, whose evaluation can be made to wait and never gets better."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from evenkeel.common.phases import activity
from evenkeel.data.dataset import InMemory
from evenkeel.training.task import Task

SAMPLES = 101


@dataclass
class Recipe(Task):
    """Linear regression on noise."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("score", "max")

    slow: str = ""
    """While this file exists, a micro-batch takes 0.2 s."""
    hold: str = ""
    """While this file exists, an evaluation after a step says so by another, of its name with .waiting, and waits."""
    dropout: float = 0.2
    """Probability."""
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

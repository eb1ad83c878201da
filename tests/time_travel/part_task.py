"""Two ways in which a run parts from another: a rare sample is scaled, or one bit of a weight changes after a step."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenkeel.tasks import Task

RARE = 137
"""The sample that is scaled."""


@dataclass
class Parting(Task):
    """Regression of noise, with dropout."""

    best: ClassVar[Any] = None

    scale: float = 1.0
    """Of the rare sample's features."""

    def train_dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(200, 8, generator=generator)
        return TensorDataset(rows, torch.randn(200, generator=generator), torch.arange(200))

    def test_dataset(self) -> TensorDataset:
        return TensorDataset(*(it[:8] for it in self.train_dataset().tensors))

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, target, number = batch
        factor = torch.where(number == RARE, self.scale, 1.0)
        hidden = model[:3](features)
        return (model[3](hidden * factor[:, None]).squeeze(1) - target).square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"error": (model(batch[0]).squeeze(1) - batch[1]).abs()}

    def after_evaluation(self, metrics: dict[str, float], step: int) -> None:
        if str(step) == os.environ.get("FLIP"):
            words = self.net[3].weight.data.view(torch.int32)
            words[0, 5] ^= 1

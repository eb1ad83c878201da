"""A task with a validation set, split at random from the training data, and two sets to test on."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from evenkeel.training.classification import Classification

WHOLE, TESTED = 71, 23  # 57 to train on and 14 to validate


def samples(count: int, seed: int) -> TensorDataset:
    """Points [count, 4], their classes, and their numbers from 1 on."""
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] > 0).long() + (points[:, 1] > 0).long(), torch.arange(1, count + 1))


@dataclass
class Validated(Classification):
    """Three classes of points. A metric's sum of sample numbers shows which were counted, and how often."""

    harmless: ClassVar[frozenset[str]] = frozenset({"hold", "validate"})
    best: ClassVar[Any] = ("loss", "min")

    hold: str = ""
    """While this file is there, each micro-batch takes a moment."""
    validate: bool = True

    def parts(self) -> Any:
        return random_split(samples(WHOLE, 0), [0.8, 0.2])

    def train_dataset(self) -> Any:
        return self.parts()[0]

    def validation_dataset(self) -> Any:
        return self.parts()[1] if self.validate else None

    def test_dataset(self) -> Any:
        return {"clean": samples(TESTED, 1), "noisy": samples(TESTED, 2)}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.hold and Path(self.hold).exists():
            time.sleep(0.05)
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": found, "numbers": batch[2].double(), "right": model(batch[0]).argmax(1) == batch[1]}

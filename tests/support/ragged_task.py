"""Samples of different sizes. `Boxes` and `Texts` lack the `collate` that docs/tasks.md shows; others have one."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from evenkeel.tasks import InMemory, Task

SAMPLES = 50


def noise(*shape: int) -> Tensor:
    """The same numbers for the same shape, whoever has drawn before."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@dataclass
class Ragged(Task):
    """What all have; `of_each` returns the loss of each sample."""

    best: ClassVar[Any] = None

    slow: str = ""
    """While this file exists, a micro-batch takes 0.2 s."""

    def of_each(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def train_dataset(self) -> Any:
        raise NotImplementedError

    def test_dataset(self) -> Any:
        return [self.train_dataset()[i] for i in range(10)]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.2)
        return self.of_each(model, batch).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.of_each(model, batch)}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.of_each(model, batch)}


@dataclass
class Boxes(Ragged):
    """Images with boxes; some have none."""

    def train_dataset(self) -> Any:
        boxes = noise(SAMPLES, 5, 4)
        return [
            (noise(SAMPLES, 3, 4, 4)[i], {"boxes": boxes[i, : i % 5], "labels": torch.arange(i % 5)})
            for i in range(SAMPLES)
        ]

    def of_each(self, model: nn.Module, batch: Any) -> Tensor:
        images, targets = batch
        scores = [model(it["boxes"]).squeeze(1) - it["labels"] for it in targets]
        return torch.stack([score.square().sum() for score in scores]) + images.mean((1, 2, 3)).square()


@dataclass
class Texts(Ragged):
    """Token numbers from 1 on; 0 is the padding."""

    def train_dataset(self) -> Any:
        return [(torch.arange(1, 2 + i % 7), float(i % 3)) for i in range(SAMPLES)]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(8, 4, padding_idx=0), nn.Dropout(0.1), nn.Linear(4, 1))

    def of_each(self, model: nn.Module, batch: Any) -> Tensor:
        texts, labels = batch
        return (model(texts).squeeze(1) - labels).square()


@dataclass
class Mixed(Ragged):
    """MixUp of data in memory; each of the three generators draws in `collate`."""

    def train_dataset(self) -> Any:
        return InMemory(noise(SAMPLES, 4), noise(SAMPLES))

    def collate(self, samples: list[Any]) -> Any:
        features, targets = super().collate(samples)
        share, order = random.betavariate(0.4, 0.4) * np.random.rand(), torch.randperm(len(samples))
        return tuple(share * it + (1 - share) * it[order] for it in (features, targets))

    def of_each(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets = batch
        return (model(features).squeeze(1) - targets).square()


@dataclass(frozen=True)
class Batch:
    rows: Tensor
    """Nested: [samples, rows, 4]."""
    names: list[str]


def nested(samples: list[Any]) -> Batch:
    rows, names = zip(*samples, strict=True)
    return Batch(torch.nested.nested_tensor(list(rows), layout=torch.jagged), list(names))


@dataclass
class Nested(Ragged):
    """A function of a port, and a batch that is a dataclass with a nested tensor and texts."""

    collate = staticmethod(nested)

    def train_dataset(self) -> Any:
        return [(noise(SAMPLES, 6, 4)[i, : 1 + i % 6], f"sample {i}") for i in range(SAMPLES)]

    def of_each(self, model: nn.Module, batch: Batch) -> Tensor:
        targets = [float(name.split()[1]) / SAMPLES for name in batch.names]
        found = zip(model(batch.rows).unbind(), targets, strict=True)
        return torch.stack([(rows.mean() - target).square() for rows, target in found])


@dataclass
class Wrong(Texts):
    """Its function fails."""

    def collate(self, samples: list[Any]) -> Any:
        return torch.stack([text for text, _ in samples])  # HERE


@dataclass
class Silent(Texts):
    """Its function returns nothing, which would pass for the batch of an idle rank."""

    def collate(self, samples: list[Any]) -> None:
        """Forgets to return."""

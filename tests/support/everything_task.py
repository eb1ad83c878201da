"""One task that does all that a task may: own collate, own order, a loss of whole batches, a state, and pictures."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from evenkeel.tasks import Task, balanced, buckets

SAMPLES = 50
LENGTHS = np.arange(SAMPLES) * 7 % 5 + 1


@dataclass
class Everything(Task):
    """Rows of different lengths, padded; two views of each are compared with those of all others of the step."""

    best: ClassVar[Any] = ("loss", "min")
    harmless: ClassVar[frozenset[str]] = frozenset({"slow"})

    slow: str = ""
    """While this file exists, a micro-batch takes 0.1 s."""
    way: Literal["weights", "order"] = "weights"
    tested: bool = True

    def __post_init__(self) -> None:
        self.weight, self.queue = 1.0, torch.zeros(0, 4)

    def train_dataset(self) -> Any:
        rows = torch.randn(SAMPLES, 5, 6, generator=torch.Generator().manual_seed(0))
        return [(rows[i, : LENGTHS[i]], i % 3) for i in range(SAMPLES)]

    def test_dataset(self) -> Any:
        return self.train_dataset()[:11] if self.tested else None

    def sample_weights(self) -> Any:
        return balanced(LENGTHS) if self.way == "weights" else None

    def order(self, epoch: int) -> Any:
        return buckets(LENGTHS, 3) if self.way == "order" else None

    def collate(self, samples: list[Any]) -> Any:
        rows = [row * random.choice([1.0, 0.5]) + 0.1 * torch.randn(len(row), 6) for row, _ in samples]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"rows": padded + 0.01 * np.random.rand(), "label": torch.tensor([label for _, label in samples])}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def views(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.05)
        means = batch["rows"].mean(1)
        a, b = model(torch.cat([means, means + 0.3 * torch.randn_like(means)])).chunk(2)
        return a, b

    def embed(self, model: nn.Module, batch: Any) -> Any:
        a, b = self.views(model, batch)
        return {"a": a, "b": b, "label": batch["label"]}

    def batch_loss(self, embeddings: Any, step: int = 0) -> Any:
        a, b = (nn.functional.normalize(embeddings[name], dim=1) for name in ("a", "b"))
        others = torch.cat([b, self.queue])
        found = nn.functional.cross_entropy(a @ others.T / 0.2, torch.arange(len(a)))
        size = embeddings["a"].square().mean()
        return found + self.weight * size, {"size": size, "label": embeddings["label"].double().mean()}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        a, b = self.views(model, batch)
        return {"loss": 1 - nn.functional.cosine_similarity(a, b)}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return self.metrics(model, batch)

    def show(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        torch.rand(3)
        return {"views": self.views(model, batch)[0].sigmoid(), "mean": batch["rows"].mean()}

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        self.weight = 0.9 * self.weight + 0.1 * losses["size"] / (1 + losses["loss"] * random.random())
        found = model(torch.full((1, 6), step / 10))
        self.queue = torch.cat([self.queue, nn.functional.normalize(found, dim=1)])[-8:]

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "queue": self.queue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.queue = state["weight"], state["queue"]


@dataclass
class TrainsInShow(Everything):
    """Its `show` forgets to go back to evaluation mode, and moves BatchNorm's statistics."""

    def show(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        self.views(model.train(), batch)
        return {}


@dataclass
class StateInEvaluation(Everything):
    """Changes its state after an evaluation, where a stop may lose it; the first is after step 5."""

    def after_evaluation(self, metrics: Mapping[str, float], step: int) -> None:
        self.weight *= 1.1


class Moving:
    """A batch of a class of its own."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        self.parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    def to(self, device: torch.device) -> "Moving":
        return self


@dataclass
class Changing(Everything):
    """Changes such a batch in `embed`."""

    def collate(self, samples: list[Any]) -> Any:
        return Moving(super().collate(samples))

    def embed(self, model: nn.Module, batch: Any) -> Any:
        found = super().embed(model, batch)
        batch["rows"].zero_()
        return found


@dataclass
class Collective(Everything):
    """May call collectives in its loss."""

    collectives = True

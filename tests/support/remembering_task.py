"""Tasks that remember something besides their networks: rightly, not at all, and in `loss`."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenkeel.tasks import InMemory, Task

SAMPLES = 101


@dataclass
class Forgetful(Task):
    """A weight that adapts to the loss, a queue of the model's answers, and a drawn number. The control: not saved."""

    best: ClassVar[Any] = None

    slow: str = ""
    """While this file exists, a micro-batch takes 0.2 s."""
    nan_in: int = -1
    """The step, from 0, whose loss is not finite."""

    def __post_init__(self) -> None:
        self.weight, self.queue, self.history = 1.0, torch.zeros(0, 1), [0.0]

    def train_dataset(self) -> Dataset[Any]:
        numbers = torch.Generator().manual_seed(0)
        return InMemory(torch.randn(SAMPLES, 4, generator=numbers), torch.randn(SAMPLES, generator=numbers))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any, step: int = 0) -> Any:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.2)
        features, targets = batch
        found = model(features).squeeze(1)
        error, size = (found - targets).square().mean(), found.square().mean()
        near = (found[:, None] - self.queue[:, 0]).abs().mean() if len(self.queue) else 0.0
        loss = error + self.weight * size + 0.1 * self.history[-1] * near
        return loss * (torch.nan if step == self.nan_in else 1.0), {"size": size}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        features, targets = batch
        return {"loss": (model(features).squeeze(1) - self.weight * targets).square()}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return self.metrics(model, batch)

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        self.weight = 0.9 * self.weight + 0.1 * losses["size"] / losses["loss"]
        self.queue = torch.cat([self.queue, model(torch.full((1, 4), step / 10))])[-8:]
        model.train()(torch.randn(3, 4))  # moves statistics, and forgets to go back
        model.eval()
        self.history = [*self.history, random.random()][-3:]


@dataclass
class Remembering(Forgetful):
    """The same, saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "queue": self.queue, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.queue, self.history = state["weight"], state["queue"], state["history"]


@dataclass
class Failing(Remembering):
    """Its hook fails in step 5."""

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        super().after_step(model, step, losses)
        if step == 5:
            raise ZeroDivisionError("a bug in the user's after_step")


@dataclass
class InLoss(Remembering):
    """Changes its state where it must not."""

    def loss(self, model: nn.Module, batch: Any, step: int = 0) -> Any:
        loss, parts = super().loss(model, batch, step)
        self.weight = 0.9 * self.weight + 0.1 * parts["size"].item()
        return loss, parts


@dataclass
class ByRank(Remembering):
    """Changes its state where it should, by what only this rank knows."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any, step: int = 0) -> Any:
        self.calls += 1
        return super().loss(model, batch, step)

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        self.weight = 1 / self.calls


@dataclass
class Unloadable(Remembering):
    """Its state could not be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"names": {"a", "b"}}


@dataclass
class OneWay(Forgetful):
    """Its state would never be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {}

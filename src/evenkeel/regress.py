"""The built-in task `regress`: a linear model on random data, the smallest job there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from .config import COUNT, check_numbers
from .data import InMemory
from .tasks import Task


@dataclass
class Regress(Task):
    """Fit a linear model to random data, which follow one with a little noise."""

    loss_: Annotated[Literal["mse", "bce"], tyro.conf.arg(name="loss")] = "mse"
    """mse: the targets are numbers. bce: they are 0 and 1, and the loss is the binary cross-entropy with logits."""
    samples: int = 2048
    """Training samples. A quarter as many are for the test."""
    inputs: int = 20
    """Numbers of a sample."""
    outputs: int = 1
    """Targets of a sample."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("loss", "min")

    def __post_init__(self) -> None:
        check_numbers(self, {"samples": (4, COUNT), "inputs": (1, COUNT), "outputs": (1, COUNT)})

    def train_dataset(self) -> InMemory:
        """Inputs from 0 to 1, float [samples, inputs], and targets, float [samples, outputs]."""
        return self._data(seed=1, samples=self.samples)

    def test_dataset(self) -> InMemory:
        """Others of the same kind."""
        return self._data(seed=2, samples=self.samples // 4)

    def model(self) -> nn.Module:
        """One linear layer."""
        return nn.Linear(self.inputs, self.outputs)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over all targets."""
        return self._each(model(batch[0]), batch[1]).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss of each sample; with bce also the share of its targets that are told right."""
        predicted = model(batch[0])
        found = {"loss": self._each(predicted, batch[1]).mean(1)}
        if self.loss_ == "bce":
            found["accuracy"] = ((predicted > 0) == (batch[1] > 0.5)).double().mean(1)
        return found

    def _each(self, predicted: Tensor, targets: Tensor) -> Tensor:
        if self.loss_ == "bce":
            return F.binary_cross_entropy_with_logits(predicted, targets, reduction="none")
        return F.mse_loss(predicted, targets, reduction="none")

    def _data(self, seed: int, samples: int) -> InMemory:
        weights = torch.randn(self.inputs, self.outputs, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        features = torch.rand(samples, self.inputs, generator=generator)
        noise = 0.1 * torch.randn(samples, self.outputs, generator=generator)
        targets = (features - 0.5) @ weights + noise
        return InMemory(features, (targets > 0).float() if self.loss_ == "bce" else targets)

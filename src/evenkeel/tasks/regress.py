"""The built-in task `regress`: a linear model on random data, the smallest job there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from ..config import option
from ..data.dataset import InMemory
from ..training.task import Task


@dataclass
class Regress(Task):
    """Fit a linear model to random data that follows a linear model, with a little noise."""

    loss_: Annotated[Literal["mse", "bce"], tyro.conf.arg(name="loss")] = "mse"
    """mse (mean squared error) or bce (targets 0 and 1, binary cross-entropy with logits)."""
    samples: int = option(2048, 4)
    """Training samples; the test has a quarter as many."""
    inputs: int = option(20, 1)
    """Input features per sample."""
    outputs: int = option(1, 1)
    """Targets per sample."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("loss", "min")

    def train_dataset(self) -> InMemory:
        """Inputs from 0 to 1, float [samples, inputs], and targets, float [samples, outputs]."""
        return self._data(seed=1, samples=self.samples)

    def test_dataset(self) -> InMemory:
        """Others of the same kind."""
        return self._data(seed=2, samples=self.samples // 4)

    def _data(self, seed: int, samples: int) -> InMemory:
        weights = torch.randn(self.inputs, self.outputs, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        features = torch.rand(samples, self.inputs, generator=generator)
        noise = 0.1 * torch.randn(samples, self.outputs, generator=generator)
        targets = (features - 0.5) @ weights + noise
        return InMemory(features, (targets > 0).float() if self.loss_ == "bce" else targets)

    def model(self) -> nn.Module:
        """One linear layer."""
        return nn.Linear(self.inputs, self.outputs)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over all targets."""
        return self._losses(model(batch[0]), batch[1]).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The loss of each sample; with bce also the share of its targets that are predicted correctly."""
        predicted = model(batch[0])
        found = {"loss": self._losses(predicted, batch[1]).mean(1)}
        if self.loss_ == "bce":
            found["accuracy"] = ((predicted > 0) == (batch[1] > 0.5)).double().mean(1)
        return found

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The outputs, with bce their probabilities, and the targets."""
        found = model(batch[0]).float()
        return {"prediction": found.sigmoid() if self.loss_ == "bce" else found, "target": batch[1]}

    def _losses(self, predicted: Tensor, targets: Tensor) -> Tensor:
        function = F.mse_loss if self.loss_ == "mse" else F.binary_cross_entropy_with_logits
        return function(predicted, targets, reduction="none")

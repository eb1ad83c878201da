"""Tasks with one mistake each, for `evenkeel check`; the guilty line ends in `# HERE`."""

import os
import random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evenkeel.training.task import Task


class Good(Task):
    """No mistake: 101 samples with dropout and BatchNorm."""

    best: ClassVar[Any] = ("loss", "min")

    def train_dataset(self) -> Any:
        x = torch.randn(101, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x[:, 0] > 0).long())

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}


class PredictsWrong(Good):
    """Trains well; only `predict` has a mistake."""

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"label": model(batch["x"]).argmax(1)}  # HERE


class Broadcasts(Good):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0])[:, :1], batch[0][:, 0])  # HERE


class Noisy(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + random.SystemRandom().gauss(0, 1), y  # HERE


class OtherAtEachRead(Good):
    """Draws its noise from dice that nobody seeds."""

    def train_dataset(self) -> Any:
        return Noisy(super().train_dataset())


class OtherOnEachRank(Good):
    """Takes a share of the data by its rank, as scripts do."""

    def train_dataset(self) -> Any:
        x, y = super().train_dataset().tensors
        first = int(os.environ.get("RANK", "0"))  # HERE
        return TensorDataset(x[first : first + 90], y[first : first + 90])


class Summed(Good):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")  # HERE


class OwnNoise(nn.Module):
    """Dropout with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dice, self.layer = torch.Generator(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * torch.rand(x.shape, generator=self.dice))  # HERE


class OwnGenerator(Good):
    def model(self) -> nn.Module:
        return OwnNoise()


class Counts(Good):
    """Its loss grows with the number of calls, from the twentieth on, so that only a restart shows it."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1  # HERE
        return super().loss(model, batch) * (1 + max(0, self.calls - 20) / 100)


class CountsInALine(Good):
    calls = 0

    def after_step(self, *_: Any) -> None: self.calls += 1  # fmt: skip  # HERE


class NoMean(Good):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": each, "worst": each.max()}  # HERE

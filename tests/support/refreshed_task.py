"""Tasks whose data the model makes: rightly, from the present weights (the control), and with mistakes."""

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenkeel.tasks import InMemory, Task
from tests.support.recording_task import is_compared

SAMPLES = 101


class Targets(Dataset[Any]):
    """Sample i is (features, target); a line "epoch i target" goes to a file of this process for each one."""

    def __init__(self, features: Tensor, targets: Sequence[float], folder: str) -> None:
        self.features, self.targets, self.folder, self.epoch = features, targets, folder, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        if self.folder and not is_compared():
            with (Path(self.folder) / str(os.getpid())).open("a") as file:
                file.write(f"{self.epoch} {index} {self.targets[index]!r}\n")
        return self.features[index], self.targets[index]


@dataclass
class Refreshed(Task):
    """Targets by the model, by what `after_step` remembers, and by a drawn number."""

    best: ClassVar[Any] = None

    record: str = ""
    """Folder for the samples that are read; empty: none."""
    slow: str = ""
    """While this file exists, a micro-batch takes 0.2 s; while one of its name with .hold does, refresh() waits, and
    says so by another with .held-RANK."""
    trace: bool = True
    """Whether refresh() draws, and changes modes and buffers."""

    def __post_init__(self) -> None:
        self.past = [0.0]

    def features(self) -> Tensor:
        return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def train_dataset(self) -> Any:
        return Targets(self.features(), [index / SAMPLES for index in range(SAMPLES)], self.record)

    def test_dataset(self) -> Any:
        return InMemory(self.features()[:37], torch.zeros(37))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def refresh(self, model: nn.Module, epoch: int) -> Any:
        if epoch == 0:
            return None
        while self.slow and Path(f"{self.slow}.hold").exists():
            Path(f"{self.slow}.held-{os.environ['RANK']}").touch()
            time.sleep(0.01)
        targets = model(self.features())[:, 0] + 0.1 * torch.rand(SAMPLES) + self.past[-1]
        if self.trace:
            model.train()(torch.randn(8, 4))  # changes statistics, and forgets to go back
        return Targets(self.features(), targets.tolist(), self.record)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.2)
        features, targets = batch
        return (model(features).squeeze(1) - targets.float()).square().mean()

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        self.past = [*self.past, losses["loss"]][-3:]

    def state_dict(self) -> dict[str, Any]:
        return {"past": self.past}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.past = state["past"]


@dataclass
class OfPresentWeights(Refreshed):
    """The control: from the weights as they are when it is called, as a callback at the start of an epoch would."""

    def model(self) -> nn.Module:
        self.live = super().model()
        return self.live

    def refresh(self, model: nn.Module, epoch: int) -> Any:
        return super().refresh(copy.deepcopy(self.live).eval(), epoch)


@dataclass
class Every2(Refreshed):
    """The same data for two epochs."""

    refresh_every: ClassVar[int] = 2

    def refresh(self, model: nn.Module, epoch: int) -> Any:
        return super().refresh(model, epoch + 1)


@dataclass
class Summing(Refreshed):
    """It remembers a sum, from which no step goes away again."""

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        self.past = [self.past[-1] + losses["loss"]]


@dataclass
class ByRank(Refreshed):
    """Other data on each rank."""

    def refresh(self, model: nn.Module, epoch: int) -> Any:
        return InMemory(self.features(), torch.full((SAMPLES,), float(os.environ.get("RANK", 0))))


@dataclass
class Short(Refreshed):
    def refresh(self, model: nn.Module, epoch: int) -> Any:
        return InMemory(self.features()[1:], torch.zeros(SAMPLES - 1))


@dataclass
class Plain(Refreshed):
    """Without refresh(): the data of `train_dataset` in each epoch."""

    refresh = Task.refresh

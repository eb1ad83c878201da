"""A task with its own order of samples, which writes down in `loss` what it has trained on."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenkeel.tasks import Task, balanced, buckets

SAMPLES = 50
LENGTHS = np.arange(SAMPLES) * 7 % 13


class Numbers(Dataset[Any]):
    """Sample i is (features with noise, i, the epoch that it was told)."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index / SAMPLES) + 0.1 * torch.rand(4), index, self.epoch


@dataclass
class Own(Task):
    """Linear regression on the numbers of samples."""

    best: ClassVar[Any] = None
    harmless: ClassVar[frozenset[str]] = frozenset({"pause", "broken"})

    way: Literal["weights", "order", "tokens"] = "weights"
    """Which of the methods the task has."""
    record: str = ""
    """Folder for the records: a line for each micro-batch that is trained on."""
    pause: float = 0.0
    """Seconds that a micro-batch takes."""
    broken: Literal["", "start", "later", "rank", "rank-later", "length"] = ""
    """What is wrong with the order: another one since now, in epoch 1 only, on rank 1, there in epoch 1, too short."""

    def train_dataset(self) -> Any:
        return Numbers()

    def test_dataset(self) -> Any:
        return [(torch.full((4,), i / 8), i, 0) for i in range(8)]

    def sample_weights(self) -> Any:
        if self.way != "weights":
            return None
        return balanced(LENGTHS) * (1 + (self.broken == "start"))

    def order(self, epoch: int) -> Any:
        if self.way != "order":
            return None
        order = buckets(LENGTHS, 3)
        late = epoch == 1 and (self.broken == "later" or (self.broken == "rank-later" and os.environ["RANK"] == "1"))
        if late or self.broken == "start" or (self.broken == "rank" and os.environ["RANK"] == "1"):
            order[[3, 4]] = order[[4, 3]]
        return order[: -1 if self.broken == "length" and epoch == 1 else None]

    def sample_lengths(self) -> Any:
        return LENGTHS + 1 + (self.broken == "start") if self.way == "tokens" else None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any, step: int = 0) -> Tensor:
        features, index, told = batch
        if model.training and self.record:
            time.sleep(self.pause)
            with (Path(self.record) / f"rank-{os.environ.get('RANK', 0)}").open("a") as file:
                file.write(json.dumps([step, index.tolist(), told.tolist()]) + "\n")
        return (model(features).squeeze(1) - index / SAMPLES).square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        features, index, _ = batch
        return {"loss": (model(features).squeeze(1) - index / SAMPLES).square()}

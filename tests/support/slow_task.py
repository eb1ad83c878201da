"""Regression in which one rank can be made slow in one part of its steps: SLOW_RANK, SLOW_PART and SLOW_SECONDS."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenkeel.training.task import Task


def delay(part: str) -> None:
    """Sleep, if it is this rank and this part, and as long as there is a file SLOW_WHILE, if one is named."""
    hold = os.environ.get("SLOW_WHILE")
    chosen = os.environ.get("SLOW_RANK") == os.environ.get("RANK") and os.environ.get("SLOW_PART") == part
    if chosen and (not hold or Path(hold).exists()):
        time.sleep(float(os.environ["SLOW_SECONDS"]))


class Rows(Dataset[Any]):
    """Noise, read sample by sample."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.randn(samples, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % 4 == 0:
            delay("data")
        return self.rows[index], self.rows[index].sum()


@dataclass
class Slow(Task):
    """Several buckets of gradients; the first layer's, where the delay of backward is, is in the last."""

    best: ClassVar[Any] = None
    width: int = 700
    unused_parameters: ClassVar[bool] = bool(os.environ.get("SLOW_UNUSED"))

    def train_dataset(self) -> Rows:
        return Rows(4096)

    def test_dataset(self) -> Rows:
        return Rows(16)

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, 1)
        )
        model[0].weight.register_hook(lambda _gradient: delay("backward"))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        rows, sums = batch
        if model.training:
            delay("forward")
        return (model(rows).squeeze(1) - sums).square().mean()

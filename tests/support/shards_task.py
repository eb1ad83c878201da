"""A task that reads shards and writes down the samples that it has trained on."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from evenkeel.data.shards import Shards
from evenkeel.training.task import Task
from tests.support.recording_task import is_compared


@dataclass
class Sharded(Task):
    """Linear regression on the numbers of samples."""

    best: ClassVar[Any] = None
    harmless: ClassVar[frozenset[str]] = frozenset({"pause"})

    folder: str = ""
    record: str = ""
    """Folder for the records: a line for each sample that is read."""
    window: int = 3
    """Blocks that are mixed."""
    pause: float = 0.0
    """Seconds that a micro-batch takes."""

    def train_dataset(self) -> Any:
        return Shards(self.folder, transform=self.read, block=4, window=self.window)

    def test_dataset(self) -> Any:
        return [self.features(number) for number in range(8)]

    def read(self, sample: dict[str, Any]) -> Any:
        number = sample["cls"]
        assert len(sample["seg.bin"]) == number, "of this very sample"
        if self.record and not is_compared():
            with (Path(self.record) / f"rank-{os.environ.get('RANK', 0)}").open("a") as file:
                file.write(f"{number}\n")
        return self.features(number)

    def features(self, number: int) -> tuple[Tensor, float]:
        return torch.full((4,), number / 100), number / 100

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.pause)
        features, target = batch
        return (model(features.float()).squeeze(1) - target.float()).square().mean()

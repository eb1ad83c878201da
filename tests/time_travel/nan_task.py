"""A task that reads its samples from files, one of which has NaN pixels from some moment on."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from evenkeel.tasks import Task

GOES_ON = torch.Generator().manual_seed(5)
"""The control's: a generator whose numbers depend on how many were drawn."""


class Files:
    """Sample i is in the file i.pt of a folder: features of shape [4]."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder).glob("*.pt"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return torch.load(self.paths[index], weights_only=True), index / len(self)


@dataclass
class FromFiles(Task):
    """Regression of a sample's number."""

    best: ClassVar[Any] = None
    harmless: ClassVar[frozenset[str]] = frozenset({"pause"})

    data_dir: str = ""
    """Folder of the samples."""
    ordinary: bool = False
    """Draw noise from a generator that goes on, instead of the seeded one."""
    pause: float = 0.0
    """Seconds that a micro-batch takes."""

    def train_dataset(self) -> Any:
        return Files(self.data_dir)

    def test_dataset(self) -> Any:
        return None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.pause)
        features, target = batch
        noise = torch.randn(features.shape, generator=GOES_ON) if self.ordinary else torch.randn_like(features)
        return (model(features + 0.1 * noise).squeeze(1) - target.float()).square().mean()

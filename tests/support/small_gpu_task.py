"""A task that needs 128 MiB of a GPU for each sample, of which it may have only a few GiB."""

from dataclasses import dataclass

import torch
from torch import nn

from evenkeel.data.dataset import InMemory
from evenkeel.training.classification import Classification


class Wide(Classification):
    def train_dataset(self) -> InMemory:
        return InMemory(torch.randn(64, 1 << 12), torch.zeros(64, dtype=torch.long))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 64, 64)), nn.Conv2d(1, 4096, 1), nn.ReLU(), nn.AvgPool2d(64), nn.Flatten()
        )


@dataclass
class Limited(Wide):
    """The same in a run, whose test set is small."""

    gib: float = 4.0
    """GiB that this process may have."""

    def test_dataset(self) -> InMemory:
        return InMemory(torch.randn(2, 1 << 12), torch.zeros(2, dtype=torch.long))

    def model(self) -> nn.Module:
        if torch.cuda.is_available():
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(0.03 + self.gib * 2**30 / whole)  # a probe leaves 0.03 free
        return super().model()

"""Tasks whose models are exported: one with `save_pretrained`, one that is called by keywords, and several networks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenkeel.training.task import Task


def points(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    return TensorDataset(torch.rand(samples, 4, generator=generator), torch.rand(samples, 1, generator=generator))


class Saves(nn.Linear):
    """With the method of transformers' models."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pt")
        print("a progress bar")


class SavesNothing(Saves):
    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        raise OSError(28, "No space left on device")


@dataclass
class Line(Task):
    """Its model is called in metrics."""

    def train_dataset(self) -> Any:
        return points(24)

    def test_dataset(self) -> Any:
        return points(7)

    def model(self) -> nn.Module:
        return Saves(4, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()


class FullDisk(Line):
    def model(self) -> nn.Module:
        return SavesNothing(4, 1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, points: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Tensor]:
        found = self.layer(points) * scale
        return {"found": found if mask is None else found * mask, "square": found.square()}


class Keywords(Line):
    """With keywords, a number among them, and a dict as the output."""

    def model(self) -> nn.Module:
        return Words()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0], scale=2.0, mask=batch[1])
        return output["found"].square().mean() + output["square"].mean()


class Branches(nn.Linear):
    """Python decides by a value."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        return output if output.sum().item() > 1 else 2 * output


class Branching(Line):
    def model(self) -> nn.Module:
        return Branches(4, 1)


class Parts(Line):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(1, 1)})

    def loss(self, model: Any, batch: Any) -> Tensor:
        return (model["b"](model["a"](batch[0])) - batch[1]).square().mean()

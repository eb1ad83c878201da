"""Points in classes; the task shows a picture of its scores, and notes on every rank what metrics it hears of."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenkeel.training.classification import Classification
from tests.support.validated_task import samples


@dataclass
class Silent(Classification):
    """The control: shows nothing."""

    notes: str = ""

    def train_dataset(self) -> Any:
        return [(point, label) for point, label, _ in samples(60, 0)]

    def test_dataset(self) -> Any:
        return [(point, label) for point, label, _ in samples(23, 1)]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model[0], model[2]]


@dataclass
class Shown(Silent):
    """With dice in `show`."""

    def show(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        assert not model.training
        torch.rand(3)
        return {"scores": model(batch[0]).sigmoid()}

    def after_evaluation(self, metrics: Mapping[str, float], step: int) -> None:
        with Path(self.notes, f"heard-{os.environ.get('RANK', 0)}").open("a") as file:
            print(json.dumps([step, metrics]), file=file)


@dataclass
class Wrong(Silent):
    """Shows no picture."""

    def show(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"scores": model(batch[0])[:, :, None, None]}


@dataclass
class Counting(Silent):
    """Counts what it shows."""

    def show(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        with Path(self.notes, "shown").open("a") as file:
            file.write("x")
        return {}

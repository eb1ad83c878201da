"""`classify` on small files: tells torchvision, in this process, where they are and what their checksums are.

The variable SMALL_FILES is JSON: attributes of torchvision's data sets by class, and under "weights" the URL of a
network's published ones.
"""

import json
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenkeel.tasks.classify import Classify


def configure(settings: dict[str, Any]) -> None:
    import torchvision

    for name, url in settings.pop("weights", {}).items():
        torchvision.models.get_model_weights(name).DEFAULT.value.url = url
    for name, attributes in settings.items():
        for attribute, value in attributes.items():
            setattr(getattr(torchvision.datasets, name), attribute, value)


if found := json.loads(os.environ.get("SMALL_FILES", "{}")):
    configure(found)


@dataclass
class Small(Classify):
    """The built-in task, slowed down if need be."""

    hold: str = ""
    """While there is a file of this name, a micro-batch takes 0.3 s."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.hold and Path(self.hold).exists():
            time.sleep(0.3)
        return super().loss(model, batch)


@dataclass
class OwnDice(Classify):
    """The control: mixes with a generator of the process, begun alike on all of them, as scripts do it."""

    @cached_property
    def dice(self) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        share = torch.rand((), generator=self.dice)
        mixed = self.inputs(images).mul(share) + self.inputs(images).roll(1, 0).mul(1 - share)
        logits = model(mixed)
        return share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels.roll(1, 0))

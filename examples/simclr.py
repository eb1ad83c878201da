"""SimCLR on the digits: the loss compares each image with all others of the step, on whichever rank they are.

    torchrun --standalone --nproc_per_node=2 train.py --task examples/simclr.py:SimClr --batch-size 256 \
        --micro-batch 32 --epochs 40 --lr 3e-3

The loop is that of train.py. Each image has the other 255 for negatives, on any number of ranks, in the memory of 32
(docs/tasks.md, "Losses over the whole batch").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenkeel import Task
from evenkeel.tasks import InMemory, digits

WIDTH = 64


@dataclass
class SimClr(Task):
    """Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020.

    A linear probe learns the labels from the features beside it, without changing them: its accuracy is the metric.
    """

    temperature: float = 0.2
    """Of the loss."""

    def train_dataset(self) -> InMemory:
        return digits(train=True)

    def test_dataset(self) -> InMemory:
        return digits(train=False)

    def model(self) -> nn.Module:
        encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, WIDTH), nn.ReLU(),
        )  # fmt: skip
        projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 32))
        return nn.ModuleDict({"encoder": encoder, "projector": projector, "probe": nn.Linear(WIDTH, 10)})

    def embed(self, model: Any, batch: list[Tensor]) -> dict[str, Tensor]:
        """Two views of each image, and what the probe says: a row for each image, so the labels come along."""
        images, labels = batch
        features = model["encoder"](torch.cat([self.view(images), self.view(images)]))
        one, other = model["projector"](features).chunk(2)
        probed = model["probe"](features[: len(images)].detach())
        return {"one": one, "other": other, "probed": probed, "label": labels}

    def batch_loss(self, embeddings: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """NT-Xent: each view must find the other view of its image among all views of the step."""
        z = F.normalize(torch.cat([embeddings["one"], embeddings["other"]]), dim=1)
        scores = (z @ z.T / self.temperature).fill_diagonal_(float("-inf"))
        partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
        contrast = F.cross_entropy(scores, partner)
        return contrast + F.cross_entropy(embeddings["probed"], embeddings["label"]), {"contrast": contrast}

    def metrics(self, model: Any, batch: list[Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        return {"accuracy": model["probe"](model["encoder"](images / 255)).argmax(1) == labels}

    @staticmethod
    def view(images: Tensor) -> Tensor:
        """Each image moved by up to one pixel, brighter or darker, and with noise; seeded for each micro-batch."""
        moves = [images.roll((dy, dx), (2, 3)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        which = torch.randint(len(moves), (len(images),), device=images.device)
        moved = torch.stack(moves, 1)[torch.arange(len(images), device=images.device), which] / 255
        gain = 0.6 + 0.8 * torch.rand(len(images), 1, 1, 1, device=images.device)
        return moved * gain + 0.1 * torch.randn_like(moved)

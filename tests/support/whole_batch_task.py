"""Tasks whose loss is over all samples of a step, with BatchNorm, dropout, and random numbers in each method.

`Gathered` is the control: the same loss with torch's `all_gather` in it, as scripts do it.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from evenkeel.data.dataset import InMemory
from evenkeel.training.task import Task

SAMPLES = 60


def nt_xent(a: Tensor, b: Tensor, temperature: float = 0.2) -> Tensor:
    """SimCLR's loss (Chen et al., 2020) of two views of each sample, both [samples, width]."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    scores = (z @ z.T / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(a)))


@dataclass
class Views(Task):
    """What both have."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("loss", "min")

    slow: str = ""
    """While this file exists, a pass of a micro-batch takes 0.05 s."""
    dropout: float = 0.2

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(0)
        return InMemory(torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % 3)

    def test_dataset(self) -> InMemory:
        return InMemory(torch.randn(10, 6, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 3)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(self.dropout)]
        return nn.Sequential(*layers, nn.Linear(16, 8))

    def views(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.05)
        x = torch.cat([batch[0], batch[0] + 0.3 * torch.randn_like(batch[0])])
        a, b = model(x).chunk(2)
        return a, b

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": 1 - F.cosine_similarity(*self.views(model, batch))}


@dataclass
class Contrast(Views):
    """Our way."""

    die: str = ""
    """RANK:STEP: kills itself between the two passes of a step, the first time: makes the file `slow`.died. RANK:other
    rows: has narrower embeddings."""

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        a, b = self.views(model, batch)
        if self.die == f"{os.environ.get('RANK')}:other rows":
            a = a[:, 1:]
        batch[0].zero_()  # a task may change its batch, and the second pass must not see that
        return {"a": a, "b": b, "label": batch[1]}

    def batch_loss(self, embeddings: dict[str, Tensor], step: int = 0) -> Any:
        if self.die == f"{os.environ.get('RANK')}:{step}" and not (done := Path(f"{self.slow}.died")).exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        a, b = embeddings["a"], embeddings["b"]
        kept = torch.rand(len(a)) > 0.1  # of all ranks the same
        loss = nt_xent(a[kept], b[kept])
        return loss, {"labels": embeddings["label"].double().mean(), "kept": kept.double().mean()}


@dataclass
class Plain(Contrast):
    """Without metrics of its own."""

    metrics = Task.metrics


@dataclass
class Gathered(Views):
    """The control."""

    collectives = True

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        a, b = self.views(model, batch)
        if not dist.is_initialized():
            return nt_xent(a, b)
        both = torch.stack([a, b])
        everyone = [torch.empty_like(both) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, both.detach())
        everyone[dist.get_rank()] = both
        return nt_xent(*torch.cat(everyone, 1))

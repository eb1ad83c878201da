"""Tasks whose networks have blocks to recompute, with BatchNorm, dropout, and numbers of Python and NumPy."""

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evenkeel.data.dataset import InMemory
from evenkeel.training.task import Losses, Task, constants

SAMPLES, WIDTH = 48, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        self.out = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.parts(x)) * (random.random() + np.random.rand() if self.training else 1)


class Naive(Block):
    """The control: checkpointed as scripts do it."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def network(outputs: int, block: type[Block] = Block) -> nn.Sequential:
    return nn.Sequential(*[block() for _ in range(3)], nn.Linear(WIDTH, outputs))


@dataclass
class Blocks(Task):
    """Linear regression on noise."""

    best: ClassVar[Any] = ("loss", "min")
    kind: ClassVar[type[Block]] = Block

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(0)
        return InMemory(torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) / SAMPLES)

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return network(1, self.kind)

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()


@dataclass
class NaiveBlocks(Blocks):
    """The control."""

    kind: ClassVar[type[Block]] = Naive


@dataclass
class Contrast(Blocks):
    """A loss of whole batches, which embeds twice."""

    def model(self) -> nn.Module:
        return network(4)

    def embed(self, model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(torch.cat([batch[0], batch[0].roll(1, 1)]))
        return torch.stack(found.chunk(2), 1)

    def batch_loss(self, embeddings: Tensor) -> Tensor:
        a, b = F.normalize(embeddings, dim=2).unbind(1)
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": model(batch[0]).square().mean(1)}

    loss = Task.loss


@dataclass
class Adversaries(Blocks):
    """Two networks in one step, one of them also as a constant, with a penalty on the gradient's norm."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"generator": network(WIDTH), "critic": network(1)})

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        generator, critic = model.children()
        made = generator(torch.randn_like(batch[0]))
        real = batch[0].clone().requires_grad_()
        scores = critic(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        d_loss = critic(made.detach()).mean() - scores.mean() + slope.square().mean()
        g_loss = -torch.func.functional_call(critic, constants(critic), made).mean()
        return d_loss + g_loss, {"d_loss": d_loss}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": model.get_submodule("critic")(batch[0]).squeeze(1)}


@dataclass
class Flat(Blocks):
    """Has no repeated blocks, and runs into the option's refusal."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


@dataclass
class Chosen(Flat):
    """The same, with blocks of its own."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model]

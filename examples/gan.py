#!/usr/bin/env python3
"""A GAN whose two networks take turns: the critic learns in even steps, the generator in odd ones.

    torchrun --standalone --nproc_per_node=2 examples/gan.py --epochs 20

Each turn is a step of its own, committed on all ranks. So a kill between two turns loses nothing, and the other
network's turn is next. Whose turn it is depends on the step's number only, on any number of ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from evenkeel import Config, Run, Task, clip_grad_norm, parse, start
from evenkeel.tasks import InMemory, digits

NOISE = 32


class Gan(Task):
    """Digits out of noise. Goodfellow et al., "Generative Adversarial Nets", 2014, with the non-saturating loss."""

    best = None  # neither network's loss says which weights are best

    def train_dataset(self) -> InMemory:
        return InMemory(digits(train=True).tensors[0])

    def test_dataset(self) -> InMemory:
        return InMemory(digits(train=False).tensors[0])

    def model(self) -> nn.Module:
        generator = nn.Sequential(
            nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )
        critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        return nn.ModuleDict({"generator": generator, "critic": critic})

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        return [
            Adam(network.parameters(), lr=config.lr, betas=(0.5, 0.999), fused=True) for network in model.children()
        ]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """The critic's: tell real images from made ones."""
        real, made = self.scores(model, batch, detached=True)
        return F.softplus(-real).mean() + F.softplus(made).mean()

    def generator_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """The generator's: pass for real."""
        _, made = self.scores(model, batch)
        return F.softplus(-made).mean()

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        real, made = self.scores(model, batch)
        return {"accuracy": ((real > 0).double() + (made <= 0).double()) / 2}

    def scores(self, model: nn.Module, batch: list[Tensor], detached: bool = False) -> tuple[Tensor, Tensor]:
        """The critic's logits of the batch's images and of as many made ones, each of shape [samples]."""
        (images,) = batch
        generator, critic = model.children()
        noise = torch.randn(len(images), NOISE, device=images.device)  # seeded for each micro-batch
        made = generator(noise).detach() if detached else generator(noise)
        return critic(images.flatten(1) / 255).squeeze(1), critic(made).squeeze(1)


def main(arguments: list[str]) -> int:
    config, task = parse(arguments, Gan)
    with Run.open(config, task) as run:
        if not run.finished:
            train(run, task)
    return 0


def train(run: Run, task: Gan) -> None:
    networks = dict(run.state.model.named_children())
    turns = [
        run.distribute(task.loss, networks["critic"]),
        run.distribute(task.generator_loss, networks["generator"]),
    ]
    for step in run.steps():
        model = turns[step.number % 2]
        for batch in model.micro_batches(step):
            loss = model(batch)
            model.backward(loss)
        norm = clip_grad_norm(run.state.parameters, run.config.clip_norm)
        run.state.set_rates(task.rates(run.config, step.number, run.plan.total_steps))
        model.step(norm)
        run.after_step(model, norm)


if __name__ == "__main__":
    start(main)

"""The recipe task with torch's own schedulers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from tests.support.recipe_task import Recipe

STEPS = 27
"""Of a run by `small_runs.recipe_job`."""


def scheduler(kind: str, optimizer: Optimizer, steps: int) -> LRScheduler:
    """One whose rate depends on what has been so far."""
    if kind == "onecycle":
        return OneCycleLR(optimizer, max_lr=0.02, total_steps=steps)
    if kind == "plateau":  # the score never gets better
        return ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=1)
    parts = [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, steps - 5)]
    return SequentialLR(optimizer, parts, [5])


def bare_rates(kind: str, lr: float = 0.002, every: int = 3) -> list[float]:
    """The rate of each step of a plain loop that evaluates after every third step."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    made: Any = scheduler(kind, optimizer, STEPS)
    rates = []
    for step in range(1, STEPS + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if kind == "plateau" and step % every == 0:
            made.step(1.0)
        elif kind != "plateau":
            made.step()
    return rates


@dataclass
class Scheduled(Recipe):
    """By a scheduler of torch's."""

    kind: str = "onecycle"

    def schedulers(self, optimizers: list[Optimizer], config: Any) -> list[LRScheduler]:
        return [scheduler(self.kind, optimizers[0], config.max_steps)]


@dataclass
class Outside(Recipe):
    """The control: the same rates from a scheduler that is not part of the committed state."""

    kind: str = "onecycle"

    def rates(self, config: Any, step: int, total_steps: int) -> float:
        if not hasattr(self, "made"):
            self.optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
            self.made = scheduler(self.kind, self.optimizer, total_steps)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.made.step()
        return rate / config.lr

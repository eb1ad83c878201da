"""Optimizers and the learning rate, which is a pure function of the step and so has no state to save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import cos, pi

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .config import Config


def build_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> Optimizer:
    """The optimizer that --optimizer, --lr and --weight-decay describe, over all parameters that learn."""
    learning = [p for p in parameters if p.requires_grad]
    lr, decay = config.lr, config.weight_decay
    # fused ones keep all their state on the device (the host's would be ahead of a GPU that hangs), and can leave a
    # step out by themselves
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in learning) or None
    if config.optimizer == "sgd":
        return SGD(learning, lr=lr, momentum=0.9, nesterov=True, weight_decay=decay, fused=fused)
    return (Adam if config.optimizer == "adam" else AdamW)(learning, lr=lr, weight_decay=decay, fused=fused)


def rate(config: Config, step: int, total_steps: int) -> float:
    """The factor on the peak learning rate at a step: a linear rise, then the schedule's fall to 0.

    Args:
        config: its warmup_steps and schedule.
        step: 0 .. total_steps-1.
        total_steps: the run's length; the factor would reach 0 at this step.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return 1 - progress if config.schedule == "linear" else (1 + cos(pi * progress)) / 2


def set_rate(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Set every parameter group's learning rate to its own peak times a factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # the peak is kept in the group, as torch's schedulers do, so that it travels with the state
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

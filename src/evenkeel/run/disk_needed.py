"""The disk space that a run's checkpoints will take at its end, said before it starts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from rich.filesize import decimal
from torch import nn
from torch.optim import Optimizer

from ..config import Config
from ..training.staging import named_tensors
from ..training.state import State


def disk_needed(config: Config, steps: int, state: State) -> str:
    """How many checkpoints a run of so many steps leaves, and their size, in a line."""
    size, more = sum(tensor.nbytes for tensor in state.tensors().values()), ""
    try:
        size += sum(map(state_after_a_step, (it for it in state.optimizers if not it.state)))
    except Exception:  # a task's own optimizer may do anything in its step
        more = " and the optimizer's state"
    kept = steps // config.keep_every
    count = kept + config.keep + config.keep_best
    return (
        f"at step {steps} the disk holds up to {count} checkpoints of {decimal(size)}{more} ({kept} by --keep-every, "
        f"{config.keep} by --keep, {config.keep_best} by --keep-best): {decimal(count * size)}"
    )


def state_after_a_step(optimizer: Optimizer) -> int:
    """Bytes of the state that an optimizer makes in its first step, which a copy takes without memory or arithmetic."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    meta = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters}
    groups: list[dict[str, Any]] = [
        {name: value for name, value in group.items() if name != "params"}
        | {"params": [meta[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    trial = copy.copy(optimizer)
    trial.param_groups, trial.state = groups, copy.copy(optimizer.state)
    for group in groups:
        group |= {name: False for name in ("fused", "foreach") if name in group}
        for p in group["params"]:
            p.grad = torch.empty_like(p)
    type(optimizer).step(trial)
    return sum(tensor.nbytes for tensor in named_tensors(dict(enumerate(trial.state.values()))).values())

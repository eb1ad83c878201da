"""How much memory a process takes while a model is divided, in bytes: of its GPU, or without one its own.

torchrun --nproc_per_node=W division_worker.py OUT.json {ours,held,before}

Controls: something holds all rows of the parameters ("held"); all of the model comes to the GPU first ("before").
"""

from __future__ import annotations

import resource
import sys

import torch
from sharded_task import Sharded
from steps import rank_0_writes
from torch import nn

from evenkeel.config import Config
from evenkeel.distributed.placement import place
from evenkeel.distributed.world import World
from evenkeel.training.sharding import Sharding
from evenkeel.training.state import State

BLOCKS, WIDTH = 8, 3000
"""Each block has 36 MB, too much for malloc to keep when it is freed."""


def peak(device: torch.device) -> int:
    """The most bytes that were allocated so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth(world: World) -> dict[str, int]:
    """The bytes of the model and of a block, and by how many the peak grows."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(BLOCKS))
    model = nn.Sequential(*layers)
    before = peak(world.device)
    place(model, Config(shard="off" if sys.argv[2] == "before" else "on"), world.devices)
    state = State(model, [torch.optim.SGD(model.parameters(), 0.1)], devices=world.devices)
    whole = [parameter.data for parameter in model.parameters()] if sys.argv[2] == "held" else []
    state.divide(Sharding(model, None, state.optimizers, Sharded(), world, "fp32"))
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    del whole
    return {"model": total, "block": total // BLOCKS, "growth": peak(world.device) - before}


if __name__ == "__main__":
    rank_0_writes(growth)

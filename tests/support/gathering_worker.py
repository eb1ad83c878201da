"""How much memory rank 0 takes to write the model.pt of a divided model, in bytes.

torchrun --nproc_per_node=W gathering_worker.py OUT.json {ours,control}

The control holds the whole tensors in ordinary memory.
"""

import hashlib
import sys
from pathlib import Path

import torch
from anonymous import growth
from steps import rank_0_writes
from torch import nn

from evenkeel.distributed.world import World
from evenkeel.run.state_files import dump
from evenkeel.tasks.classify import Classify
from evenkeel.training.sharding import Sharding
from evenkeel.training.state_dicts import sha256

BLOCKS, WIDTH = 8, 3000


def taken(world: World) -> dict:
    """The bytes of the model and of its largest tensor, by how many the memory grows, and whether all is right."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS))
    model, folder = nn.Sequential(*layers), Path(sys.argv[1]).parent
    expected = sha256(model.state_dict())
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sharding = Sharding(model, None, [], Classify(), world, "fp32")
    state: dict = model.state_dict()
    with growth() as most:
        if sys.argv[2] == "ours":
            weights = sharding.gathered(state, folder)
        else:
            weights = {name: tensor.full_tensor() for name, tensor in state.items()}
        if world.rank == 0:
            with (folder / "model.pt").open("wb") as file:
                written = dump(weights, file)
    right = world.rank > 0 or sha256(weights) == expected == sha256(torch.load(folder / "model.pt", mmap=True))
    if world.rank == 0:
        right = right and hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest() == written.sha256
    return {"model": total, "largest": 4 * WIDTH**2, "growth": most[0], "right": right}


if __name__ == "__main__":
    rank_0_writes(taken)

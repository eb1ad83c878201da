"""The most memory that each rank of --shard on takes until its model is divided, in bytes, beside those of the model.

torchrun --nproc_per_node=W host_memory_worker.py OUT.json EMA {meta,real}

Control: `model()` cannot be built on the meta device ("real").
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from steps import rank_0_writes
from torch import Tensor, nn

import evenkeel.training.sharding  # noqa: F401  # imports FSDP2, likewise
from benchmarks.shard_memory import memory, peak
from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.run.build import build_model_of_rank, build_state, shard
from evenkeel.training.task import Task

BLOCKS, WIDTH = 6, 3000
"""Each block has 36 MB, too much for malloc to keep when it is freed."""


class Wide(Task):
    """Blocks of one layer."""

    train_dataset = test_dataset = lambda _: [torch.ones(WIDTH)] * 4

    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(BLOCKS)]
        if sys.argv[3] == "real":
            torch.rand(1, device="cpu")
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()  # type: ignore[no-any-return]


def growth(world: World) -> dict[str, Any]:
    """The bytes of the model and of a block, and the growth of each rank."""
    task, config = Wide(), Config(shard="on", reduce="tree", ema=float(sys.argv[2]), micro_batch=1, batch_size=4)
    torch.optim.SGD([torch.ones(1)])  # imports torch's compiler, whose memory does not count
    peak()
    before = memory()["RssAnon"]
    model, _ = build_model_of_rank(config, task, world)
    state = build_state(config, task, world, Plan(4, 4, 1, 1), model, {"training": task.train_dataset()})
    shard(state, task, world, config)
    grown = world.gather(peak() - before)
    return {"model": 4 * BLOCKS * WIDTH**2, "block": 4 * WIDTH**2, "growth": grown}


if __name__ == "__main__":
    rank_0_writes(growth)

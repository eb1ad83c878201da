"""The bytes that each rank sends in a step of a sharded network: counted where torch hands collectives to the process
group, and what docs/sharding.md says. Rank 0 writes both.

torchrun --nproc_per_node=W sharded_bytes_worker.py OUT.json MICRO_BATCHES PRECISION
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sharded_task import Sharded
from sharded_worker import batch
from steps import rank_0_writes
from torch.utils._python_dispatch import TorchDispatchMode

from evenkeel.distributed.world import World
from evenkeel.training.sharding import Sharding


class Wire(TorchDispatchMode):
    """Counts what this rank sends to others: of a gather its part to each of them, of an exchange their rows."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.sent = world, {"weights": 0, "gradients": 0, "other": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, ranks = func.overloadpacket.__name__, self.world.world_size
            if name == "_allgather_base_":
                self.sent["weights"] += args[1].nbytes * (ranks - 1)
            elif name == "alltoall_base_":
                own = args[4][self.world.rank] * args[1].element_size()
                self.sent["gradients"] += args[1].nbytes - own
            else:
                self.sent["other"] += 1
        return func(*args, **(kwargs or {}))


def formula(world: World, micro_batches: int, wide: int) -> dict[str, int]:
    """The same by docs/sharding.md, of a network whose rows are padded to a multiple of the ranks."""
    ranks = world.world_size
    numbers = sum(-(-len(p) // ranks) * ranks * p[0].numel() for p in Sharded().model().parameters())
    rounds, own = -(-micro_batches // ranks), len(range(world.rank, micro_batches, ranks))
    once = numbers * (ranks - 1) // ranks
    return {"weights": 2 * rounds * once * wide, "gradients": own * once * 4, "other": 0}


def one_step(world: World) -> dict[str, Any]:
    """Both, of a step of so many micro-batches."""
    micro_batches, precision, task = int(sys.argv[2]), sys.argv[3], Sharded()
    torch.manual_seed(0)
    model = task.model()
    reduction = Sharding(model, None, [], task, world, precision).reduction
    reduction.begin([range(micro_batches)])
    with Wire(world) as wire:
        for _ in range(-(-micro_batches // world.world_size)):
            own = reduction.present.start + world.rank
            number = own if own < micro_batches else 0
            (task.loss(model, batch(number)) / micro_batches).backward()
            reduction.accumulate(number)
    found = {"counted": wire.sent, "formula": formula(world, micro_batches, 2 if precision == "bf16" else 4)}
    return {str(rank): each for rank, each in enumerate(world.gather(found))}


if __name__ == "__main__":
    rank_0_writes(one_step)

"""The bytes that each rank sends in a step of a sharded network: counted where torch hands collectives to the process
group, and what docs/sharding.md says. Rank 0 writes both.

torchrun --nproc_per_node=W sharded_bytes_worker.py OUT.json MICRO_BATCHES PRECISION [RANKS-OF-A-REPLICA]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from sharded_task import Sharded
from sharded_worker import batch
from steps import rank_0_writes
from torch.utils._python_dispatch import TorchDispatchMode

from evenkeel.distributed.world import World
from evenkeel.training.sharding import Sharding


class Wire(TorchDispatchMode):
    """Counts what this rank sends to others: of a gather its part to each of them, of an exchange their rows.
    "replicas" is what goes to the ranks of other replicas."""

    def __init__(self, owners: Any) -> None:
        super().__init__()
        self.owners, self.sent = owners, {"weights": 0, "gradients": 0, "replicas": 0, "other": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, group = func.overloadpacket.__name__, dist.ProcessGroup.unbox(args[2])
            between = self.owners and group.group_name == self.owners.group_name
            if name == "_allgather_base_":
                self.sent["replicas" if between else "weights"] += args[1].nbytes * (group.size() - 1)
            elif name == "alltoall_base_":
                own = args[4][group.rank()] * args[1].element_size()
                self.sent["replicas" if between else "gradients"] += args[1].nbytes - own
            else:
                self.sent["other"] += 1
        return func(*args, **(kwargs or {}))


def formula(world: World, micro_batches: int, wide: int, ranks: int) -> dict[str, int]:
    """The same by docs/sharding.md, of a network whose rows are padded to a multiple of the ranks of a replica."""
    replicas, rest = world.world_size // ranks, micro_batches % world.world_size
    numbers = sum(-(-len(p) // ranks) * ranks * p[0].numel() for p in Sharded().model().parameters())
    rounds = -(-micro_batches // world.world_size)
    own = len(range(world.rank, micro_batches, world.world_size))
    once = numbers * (ranks - 1) // ranks
    # a replica without a micro-batch in the last round sends none then
    sums = rounds - (0 < rest <= world.rank // ranks * ranks)
    between = padded_blocks(ranks, replicas) * (replicas - 1) // replicas * (sums + 1) * 4
    return {"weights": 2 * rounds * once * wide, "gradients": own * once * 4, "replicas": between, "other": 0}


def padded_blocks(ranks: int, replicas: int) -> int:
    """Numbers of a rank's rows, each block's padded to a multiple of the replicas."""
    model: Any = Sharded().model()
    inner = {parameter: number for number, block in enumerate(model.blocks) for parameter in block.parameters()}
    of: dict[int, int] = {}
    for p in model.parameters():
        of[inner.get(p, -1)] = of.get(inner.get(p, -1), 0) + -(-len(p) // ranks) * p[0].numel()
    return sum(-(-numbers // replicas) * replicas for numbers in of.values())


def one_step(world: World) -> dict[str, Any]:
    """Both, of a step of so many micro-batches."""
    micro_batches, precision, task = int(sys.argv[2]), sys.argv[3], Sharded()
    torch.manual_seed(0)
    model = task.model()
    ranks = int(sys.argv[4]) if len(sys.argv) > 4 else world.world_size
    sharding = Sharding(model, None, [], task, world, precision, ranks)
    reduction = sharding.reduction
    reduction.begin_step([range(micro_batches)])
    with Wire(sharding._owners) as wire:
        for _ in range(-(-micro_batches // world.world_size)):
            own = reduction.present.start + world.rank
            number = own if own < micro_batches else 0
            (task.loss(model, batch(number)) / micro_batches).backward()
            reduction.accumulate(number)
    found = {"counted": wire.sent, "formula": formula(world, micro_batches, 2 if precision == "bf16" else 4, ranks)}
    return {str(rank): each for rank, each in enumerate(world.gather(found))}


if __name__ == "__main__":
    rank_0_writes(one_step)

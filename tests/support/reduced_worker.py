"""In which of four steps do the ranks hold one gradient after several micro-batches each? Rank 0 writes it as JSON.

torchrun --nproc_per_node=2 reduced_worker.py OUT.json

Done our way, and with the reduction of the third step left out, as `static_graph` has done it (pytorch issue 143580).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from steps import passes
from torch.nn.parallel import DistributedDataParallel

from evenkeel.data.plan import Plan
from evenkeel.distributed.exits import leave
from evenkeel.distributed.world import World
from evenkeel.tasks.classify import Classify
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.state import State

PLAN = Plan(samples=128, global_batch=32, micro_batch=5, epochs=1)  # four a rank, and then three


def reduced(world: World, fails_in: int | None) -> list[bool]:
    """For each step whether all ranks hold the same gradient."""
    torch.manual_seed(0)
    task = Classify(width=2)
    data = task.train_dataset()
    state = State(task.model(), [])
    gradients = DistributedLoss(task.loss, state, world, PLAN)
    ddp = gradients.module
    assert isinstance(ddp, DistributedDataParallel)
    found = []
    for step in range(PLAN.total_steps):
        state.clear_gradients()
        mine = PLAN.micro_batches(step, world.rank, world.world_size)
        batches = [data.__getitems__(list(range(m.start, m.start + m.size))) for m in mine]
        gradients.module = ddp.module if step == fails_in else ddp
        passes(gradients, step, mine, batches)
        own = torch.cat([p.grad.flatten() for p in state.parameters if p.grad is not None]).tolist()
        everyone = world.gather(own)
        found.append(all(other == everyone[0] for other in everyone))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = World.from_environment()
    with world.connected():
        result = {"ours": reduced(world, None), "control": reduced(world, 2)}
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(result))
    leave(0)

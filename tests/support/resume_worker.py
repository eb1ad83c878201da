"""Train eight steps in one go, and again with a resume after the third: do the weights agree in every bit?

torchrun --nproc_per_node=4 resume_worker.py OUT.json

A resume is what makes DDP begin anew: the same state, a new wrapper. Done our way and with plain DDP.
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
from evenkeel.training.distributed_loss import DistributedLoss, Loss, LossFunction
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.state import State, sha256

PLAN = Plan(samples=256, global_batch=32, micro_batch=8, epochs=1)


class Stock(DistributedLoss):
    """With plain DDP."""

    def __init__(self, loss: LossFunction, state: State, world: World, plan: Plan) -> None:
        super().__init__(loss, state, world, plan, unused=True)  # there is no hook of ours that would know better
        self.module = DistributedDataParallel(Loss(state.model, loss))


def train(kind: type[DistributedLoss], world: World, stops: tuple[int, ...]) -> str:
    """The fingerprint after all steps, with the wrapper and the optimizer built anew at each stop."""
    task = Classify()
    data = task.train_dataset()
    saved = None
    for first, end in zip((0, *stops), (*stops, PLAN.total_steps), strict=True):
        torch.manual_seed(0)
        model = task.model()
        state = State(model, [torch.optim.AdamW(model.parameters(), lr=1e-2)])
        if saved:
            state.restore(saved)
        gradients = kind(task.loss, state, world, PLAN)
        for step in range(first, end):
            state.clear_gradients()
            mine = PLAN.micro_batches(step, world.rank, world.world_size)
            batches = [data.__getitems__(list(range(m.start, m.start + m.size))) for m in mine]
            passes(gradients, step, mine, batches)
            gradients.step(clip_grad_norm(model.parameters(), 0.0))
        saved = state.capture()
    return sha256(model.state_dict())


if __name__ == "__main__":
    torch.set_num_threads(1)
    world = World.from_environment()
    with world.connected():
        sides = {"ours": DistributedLoss, "stock": Stock}
        result = {name: train(kind, world, ()) == train(kind, world, (3,)) for name, kind in sides.items()}
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(result))
    leave(0)

"""Random bit flips in gradients of a small nasty model, and steps without any; rank 0 writes what was found as JSON.

torchrun --nproc_per_node=3 flips_worker.py OUT.json FLIPS STEPS

Each flip is on a random rank, in a random bit of a random parameter's gradient, once or on every use. After a flip the
device counts as replaced: the fault is gone, and so is the count of what the rank has done wrong.
"""

import itertools
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from steps import rank_0_writes

from evenkeel.common.naming import BIT_FLIPS
from evenkeel.config import Config
from evenkeel.data.loader import make_loader
from evenkeel.data.sampler import ElasticSampler, by_step
from evenkeel.distributed.world import World
from evenkeel.run.verification import Verification
from evenkeel.run.verified_loss import VerifiedLoss
from evenkeel.training.digest import digests, on_host
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.precision import autocast
from evenkeel.training.state import State
from tests.support.recipe_task import Recipe

BATCH, MICRO = 12, 3


class Side:
    """A model that is trained step by step; with BatchNorm, dropout and bfloat16."""

    def __init__(self, world: World, every: int) -> None:
        torch.manual_seed(0)
        task, config = Recipe(), replace(Config(), verify_every=every, reduce="tree")
        model = task.model()
        self.state = State(model, [build_optimizer(list(model.parameters()), config)])
        train_set = task.train_dataset()
        ranks = {"num_replicas": world.world_size, "rank": world.rank}
        sampler = ElasticSampler(train_set, BATCH, MICRO, **ranks, drop_last=True)  # no idle rank: each fault strikes
        self._sampler, self._batches = sampler, make_loader(train_set, sampler, "train", 0, world.device)

        def loss(network: torch.nn.Module, batch: Any) -> torch.Tensor:
            with autocast("bf16", "cpu"):
                return task.loss(network, batch)

        nobody: Any = SimpleNamespace(config=config, world=world, status={}, lead=None, say=lambda _: None)
        self.verification = Verification(nobody, self.state, nobody)
        self.model = VerifiedLoss(self.verification, loss, self.state, world, sampler.plan, Config(reduce="tree"))

    def attempts(self) -> Iterator[bool]:
        """Try a step for each next(), again until it is committed; yields whether it was."""
        for epoch in itertools.count():
            first = 0
            while first < self._sampler.plan.steps_per_epoch:
                self._sampler.set_epoch(epoch, first)
                for step in by_step(self._batches, self._sampler):
                    for batch in self.model.micro_batches(step):
                        self.model.backward(self.model(batch))
                    self.model.step(clip_grad_norm(self.model.parameters(), 1.0))
                    yield not self.verification.repeats_step
                    if self.verification.repeats_step:
                        break
                    first += 1

    def bits(self) -> dict[str, str]:
        return digests(self.state.tensors())


def flipped(side: Side, quiet: Side, world: World, number: int) -> dict[str, Any]:
    """Plant so many flips, one in every other step; what became of them."""
    tried, calm, dice = side.attempts(), quiet.attempts(), random.Random(29)
    found: dict[str, Any] = {"found": 0, "named": 0, "sticky": 0, "missed by itself": 0, "equal": 0}
    flips: Any = side.model._flips
    for _ in range(number):
        victim, seed, sticky = dice.randrange(world.world_size), dice.randrange(10**9), dice.random() < 0.5
        if world.rank == victim:
            flips._fault = {"rank": victim, "where": "gradient", "sticky": sticky, "seed": seed}
        before, alarms = side.state.step, len(side.verification.alarms)
        found["found"] += not next(tried) and side.state.step == before
        named = side.verification.alarms[alarms:]
        found["named"] += len(named) == 1 and named[0].startswith(f"rank {victim} computed a wrong gradient (")
        if sticky:  # the control: the same rank computes its micro-batch again
            mine = on_host(side.model.mine)
            missed = world.all_gather(mine == side.model.compute_again(side.model.kept))
            found["sticky"] += 1
            found["missed by itself"] += missed[victim]
        flips._fault = {}
        side.verification._wrong.clear()
        while side.state.step <= before + 1:
            next(tried)
        while quiet.state.step < side.state.step:
            next(calm)
        found["equal"] += side.bits() == quiet.bits()
    return found


def found(world: World) -> dict[str, Any]:
    """Train with flips, and then as many steps as asked for without."""
    side, quiet, calm = Side(world, 1), Side(world, 0), Side(world, 1)
    result, tried = flipped(side, quiet, world, int(sys.argv[2])), calm.attempts()
    committed = sum(next(tried) for _ in range(int(sys.argv[3])))
    return result | {"committed": committed, "verified": calm.verification.steps, "alarms": calm.verification.alarms}


if __name__ == "__main__":
    os.environ[BIT_FLIPS] = f"{sys.argv[1]}.none"  # never there: the faults are planted above
    rank_0_writes(found)

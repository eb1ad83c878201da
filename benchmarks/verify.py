"""What `--verify-every N` costs: steps with N = 1, 10 and 100 against steps without.

    torchrun --standalone --nproc_per_node=3 benchmarks/verify.py

All sides train the same network in one process group, a hundred steps of each in turn, so that each turn has whole
periods of every N. Prints the ratios of median turns; "off again" shows how much of a difference is noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import tyro
from turns import in_turn

from evenkeel.config import Config
from evenkeel.data.loader import make_loader
from evenkeel.data.sampler import ElasticSampler, by_step
from evenkeel.distributed.world import World
from evenkeel.run.verification import Verification
from evenkeel.run.verified_loss import VerifiedLoss
from evenkeel.tasks.classify import Classify
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.state import State

TURN = 100
"""Steps of a side before it is the other's turn."""


@dataclass(frozen=True)
class Options:
    """Compare step times."""

    turns: int = 10
    """Turns of 100 steps of each side that are measured."""
    batch_size: int = 96
    """Global batch."""
    micro_batches: int = 4
    """Of each rank: one of them is computed again."""
    width: int = 32
    """Width of the network."""


def steps(every: int, task: Classify, world: World, options: Options) -> Iterator[None]:
    """The loop of train.py, with --verify-every; one step for each next()."""
    torch.manual_seed(0)
    model = task.model().to(world.device)
    config = replace(Config(), verify_every=every, reduce="tree")
    state = State(model, [build_optimizer(list(model.parameters()), config)])
    train_set = task.train_dataset()
    micro_batch = options.batch_size // world.world_size // options.micro_batches
    sampler = ElasticSampler(train_set, options.batch_size, micro_batch, num_replicas=world.world_size, rank=world.rank)
    batches = make_loader(train_set, sampler, "train", 0, world.device)
    nobody: Any = SimpleNamespace(config=config, world=world, status={}, lead=None, say=lambda _: None)
    loss = partial(VerifiedLoss, Verification(nobody, state, nobody)) if every else DistributedLoss
    made = loss(task.loss, state, world, sampler.plan, Config(reduce="tree"))
    full_steps = len(train_set) // options.batch_size
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for step in itertools.islice(by_step(batches, sampler), full_steps):
            for batch in made.micro_batches(step):
                made.backward(made(batch))
            made.step(clip_grad_norm(model.parameters(), 1.0))
            yield


def main(options: Options) -> None:
    """Measure and print."""
    world = World.from_environment()
    task = Classify(width=options.width)
    sides = {"off": 0, "off again": 0, "N = 1": 1, "N = 10": 10, "N = 100": 100}
    with world.connected():
        loops = {name: steps(every, task, world, options) for name, every in sides.items()}
        seconds = in_turn(loops, options.turns, world.device, TURN)
        if world.rank == 0:
            base = median(seconds["off"])
            print(
                f"step without: {base * 1e3 / TURN:.2f} ms, median of {options.turns} turns, {world.world_size} ranks"
            )
            for name in list(sides)[1:]:
                print(f"{name} / off = {median(seconds[name]) / base:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Options))

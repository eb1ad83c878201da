"""What it costs a step to be safe and seen: signals, heartbeats, commits and arrivals, against a step without them.

    torchrun --standalone --nproc_per_node=2 benchmarks/guards.py

Both sides train the same network in one process group, block by block in turn: with the thread that waits for
signals, a heartbeat a second through the store, the gradient's norm, and a commit that leaves out what is not
finite; and without all that, where the optimizer steps by itself. A third side has also its arrivals measured, and
exchanged every 10 steps (docs/live.md). Prints the ratios of median step times, and that of the side without against
itself, which shows how much of it is noise.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import tyro

from evenkeel.config import Config
from evenkeel.data.loader import loader
from evenkeel.data.sampler import ElasticSampler, by_step
from evenkeel.distributed.world import World
from evenkeel.resilience.hang import Watch
from evenkeel.resilience.interruption import Interruption
from evenkeel.tasks.classify import Classify
from evenkeel.training.arrivals import Arrivals
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.state import State

BLOCK = 10
"""Steps that a side takes before it is the other's turn."""


@dataclass(frozen=True)
class Options:
    """Compare step times."""

    blocks: int = 30
    """Blocks of 10 steps of each side that are measured."""
    batch_size: int = 128
    """Global batch."""
    width: int = 64
    """Width of the network."""


def steps(guarded: bool, arrivals: Arrivals | None, task: Classify, world: World, batch_size: int) -> Iterator[None]:
    """The loop of train.py; one step for each next()."""
    torch.manual_seed(0)
    model = task.model().to(world.device)
    state = State(model, [build_optimizer(list(model.parameters()), Config())])
    train_set = task.train_dataset()
    micro_batch = batch_size // world.world_size
    sampler = ElasticSampler(train_set, batch_size, micro_batch, num_replicas=world.world_size, rank=world.rank)
    batches = loader(train_set, sampler, "train", 0, world.device)
    gradients = DistributedLoss(task.loss, state, world, sampler.plan, arrivals=arrivals)
    full_steps = len(train_set) // batch_size
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for step in itertools.islice(by_step(batches, sampler), full_steps):
            state.clear_gradients()
            for batch in gradients.micro_batches(step):
                gradients.backward(gradients(batch))
            if guarded:
                gradients.step(clip_grad_norm(model.parameters(), 0.0))
            else:
                state.optimizers[0].step()
            if arrivals and (step.number + 1) % BLOCK == 0:
                arrivals.exchange(step.number)
            yield


def main(options: Options) -> None:
    """Measure and print."""
    Interruption(grace=25.0)
    world = World.from_environment()
    task = Classify(width=options.width)
    with world.connected() as store, TemporaryDirectory() as logs:
        sides = {"without": False, "without again": False, "with": True, "with, and measured": True}
        loops = {
            name: steps(guarded, Arrivals(world) if "measured" in name else None, task, world, options.batch_size)
            for name, guarded in sides.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for block in range(options.blocks + 1):
            # in turn, so that none always comes after the same other one
            first = block % len(loops)
            for name in itertools.islice(itertools.cycle(loops), first, first + len(loops)):
                loop = loops[name]
                watch = Watch(600.0, world, store, Path(logs), lambda: None) if sides[name] else nullcontext()
                with watch:
                    for _ in range(BLOCK):
                        begun = time.perf_counter()
                        next(loop)
                        if world.device.type == "cuda":
                            torch.cuda.synchronize()
                        if block:  # the first is the warm-up
                            seconds[name].append(time.perf_counter() - begun)
        if world.rank == 0:
            base = median(seconds["without"])
            print(f"unguarded step: {base * 1e3:.2f} ms, median of {len(seconds['without'])}, {world.world_size} ranks")
            pairs = [("without again", "without"), ("with", "without"), ("with, and measured", "with")]
            for name, other in pairs:
                print(f"{name} / {other} = {median(seconds[name]) / median(seconds[other]):.3f}")


if __name__ == "__main__":
    main(tyro.cli(Options))

"""What an elastic step costs: Evenkeel's against a bare DDP loop, interleaved step by step in one process group.

    torchrun --standalone --nproc_per_node=2 benchmarks/step.py

Both sides train the same network on batches of the same size, cut into as many micro-batches as there are ranks, so
that each rank does one forward and one backward pass. Prints the ratio of median step times, and that of the bare loop
against itself, which shows how much of it is noise. Data loading is part of both: torch's sampler and collation there,
ours here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
import tyro
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evenkeel import data
from evenkeel.classify import Classify
from evenkeel.data import ElasticSampler
from evenkeel.gradients import Gradients, clip
from evenkeel.state import State
from evenkeel.world import World


@dataclass(frozen=True)
class Options:
    """Compare step times."""

    steps: int = 200
    """Steps of each side that are measured."""
    batch_size: int = 128
    """Global batch of both sides."""
    width: int = 64
    """Width of the network."""


def bare(task: Classify, world: World, batch_size: int) -> Iterator[None]:
    """The loop of PyTorch's own DDP tutorial; one step for each next()."""
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_set = TensorDataset(*task.train_dataset().tensors)
    sampler: DistributedSampler[object] = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size // world.world_size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(task.inputs(images.to(world.device))), labels.to(world.device)).backward()
            optimizer.step()
            yield


def elastic(task: Classify, world: World, batch_size: int) -> Iterator[None]:
    """The loop of train.py."""
    torch.manual_seed(0)
    model = task.model().to(world.device)
    state = State(model, [torch.optim.AdamW(model.parameters(), lr=1e-3)])
    train_set = task.train_dataset()
    micro_batch = batch_size // world.world_size
    sampler = ElasticSampler(train_set, batch_size, micro_batch, num_replicas=world.world_size, rank=world.rank)
    batches = data.loader(train_set, sampler, "train", 0, world.device)
    gradients = Gradients(task, state, world, sampler.plan)
    full_steps = len(train_set) // batch_size
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for step, mine, their_batches in itertools.islice(data.by_step(batches, sampler), full_steps):
            state.clear_gradients()
            done = gradients.of_step(step, mine, their_batches)
            state.commit(done.buffers, clip(model.parameters(), 0.0))
            yield


def main(options: Options) -> None:
    """Measure and print."""
    world = World.from_environment()
    task = Classify(width=options.width)
    with world.connected():
        sides = {"bare": bare, "bare again": bare, "elastic": elastic}
        loops = {name: side(task, world, options.batch_size) for name, side in sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for step in range(options.steps + 20):
            for name, loop in loops.items():
                begun = time.perf_counter()
                next(loop)
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                if step >= 20:  # warm-up: allocators, DDP's bucket rebuild
                    seconds[name].append(time.perf_counter() - begun)
        if world.rank == 0:
            base = median(seconds["bare"])
            print(f"bare DDP step: {base * 1e3:.2f} ms, median of {options.steps}, {world.world_size} ranks")
            for name in ("bare again", "elastic"):
                print(f"{name} / bare = {median(seconds[name]) / base:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Options))

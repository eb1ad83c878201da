"""What `--shard on` costs: its steps against FSDP2's own reduce-scatter and against DDP, and each rank's state; and
what `--replicate 1` adds, if each rank were a node.

    torchrun --standalone --nproc_per_node=2 benchmarks/shard.py

All sides train the same transformer in one process group, a step of each in turn. Prints the ratios of median steps,
the bytes of weights and moments on a rank, and what part of a step the copy into a slot takes; "stock again" shows how
much of a difference is noise.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from turns import in_turn

from evenkeel.config import Config
from evenkeel.data.plan import MicroBatch, Plan
from evenkeel.data.sampler import Step
from evenkeel.distributed.world import World
from evenkeel.tasks.transformer import Decoder
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.replica import Replica
from evenkeel.training.sharding import Sharding
from evenkeel.training.slots import Slots
from evenkeel.training.staging import named_tensors
from evenkeel.training.state import State
from evenkeel.training.task import Task


@dataclass(frozen=True)
class Options:
    """Compare step times."""

    turns: int = 15
    """Steps of each side that are measured."""
    micro_batches: int = 2
    """Of each rank, of two samples."""
    width: int = 256
    """Of the transformer."""
    layers: int = 6
    """Of the transformer."""
    length: int = 64
    """Tokens of a sample."""
    vocabulary: int = 4096
    """Of the tokens."""


class Text(Task):
    """Random tokens."""

    def __init__(self, options: Options) -> None:
        self.its = options

    def model(self) -> nn.Module:
        """The transformer of `lm`."""
        its = self.its
        return Decoder(its.vocabulary, its.width, heads=4, layers=its.layers, dropout=0.0, end=None)

    def train_dataset(self) -> Any:
        """None: the batches are made here."""

    test_dataset = train_dataset

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy of the next token."""
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def batch(self, micro_batch: MicroBatch) -> Tensor:
        """The tokens of a micro-batch, [samples, length + 1]."""
        seeded = torch.Generator().manual_seed(micro_batch.step * 1000 + micro_batch.id)
        return torch.randint(0, self.its.vocabulary, (micro_batch.size, self.its.length + 1), generator=seeded)


@dataclass
class Side:
    """What one side has measured besides its steps."""

    state_bytes: int = 0
    copies: list[float] = field(default_factory=list)


def ours(name: str, task: Text, world: World, plan: Plan, side: Side) -> Iterator[None]:
    """The loop of train.py with `--reduce tree`; one step for each next()."""
    shard = name != "ddp"
    torch.manual_seed(0)
    model = task.model().to(world.device)
    state = State(model, [AdamW(model.parameters(), 1e-4, foreach=True)])
    if shard:
        state.divide(Sharding(model, None, state.optimizers, task, world, "fp32"))
    made = DistributedLoss(task.loss, state, world, plan, Config(reduce="tree"))
    slots = Slots([os.memfd_create("slot") for _ in range(2)], world.devices)
    single = replace(world, local_world_size=1)  # a node of its own
    replica = Replica(single, [os.memfd_create("copy") for _ in range(2)]) if name == "replicated" else None
    for number in itertools.count():
        every = plan.micro_batches(number)
        contiguous = plan.micro_batches(number, world.rank, world.world_size)
        mine = every[world.rank :: world.world_size] if shard else contiguous
        for batch in made.micro_batches(Step(number, mine, map(task.batch, mine))):
            made.backward(made(batch))
        made.step(clip_grad_norm(state.parameters, 1.0))
        begun = time.perf_counter()
        if shard:
            slots.write(lambda slot: state.capture(staging=slot), {"step": state.step})
        side.copies.append(time.perf_counter() - begun)
        if replica:
            replica.exchange(slots.holding(state.step))
        if not side.state_bytes:  # in the first step, which is not measured
            side.state_bytes = sum(tensor.nbytes for tensor in named_tensors(state.capture()).values())
        yield


def stock(task: Text, world: World, plan: Plan) -> Iterator[None]:
    """FSDP2 as its tutorial has it, which reduces the gradient of each micro-batch."""
    torch.manual_seed(0)
    model: Any = task.model().to(world.device)
    for module in [*model.blocks, model]:
        fully_shard(module, reshard_after_forward=True)
    optimizer = AdamW(model.parameters(), 1e-4, foreach=True)
    for number in itertools.count():
        optimizer.zero_grad()
        for micro_batch in plan.micro_batches(number, world.rank, world.world_size):
            loss = task.loss(model, task.batch(micro_batch).to(world.device))
            (loss * micro_batch.size / plan.step_samples(number)).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def main(options: Options) -> None:
    """Measure and print."""
    world, task = World.from_environment(), Text(options)
    batch = 2 * options.micro_batches * world.world_size
    plan = Plan(samples=batch * 10**6, global_batch=batch, micro_batch=2, epochs=1)
    with world.connected():
        sides = {"sharded": Side(), "replicated": Side(), "ddp": Side()}
        loops: dict[str, Iterator[None]] = {"stock": stock(task, world, plan), "stock again": stock(task, world, plan)}
        loops |= {name: ours(name, task, world, plan, side) for name, side in sides.items()}
        seconds = in_turn(loops, options.turns, world.device)
        if world.rank == 0:
            steps = {name: median(found) for name, found in seconds.items()}
            print(f"a step of FSDP2: {steps['stock'] * 1e3:.0f} ms, {world.world_size} ranks, {options.turns} turns")
            for name in ("stock again", "sharded"):
                print(f"{name} / stock = {steps[name] / steps['stock']:.2f}")
            print(f"sharded / ddp = {steps['sharded'] / steps['ddp']:.2f}")
            print(f"replicated / sharded = {steps['replicated'] / steps['sharded']:.2f}")
            copies = median(sides["sharded"].copies[-options.turns :])
            print(f"the copy into a slot: {copies / steps['sharded']:.3f} of a sharded step")
            share = sides["sharded"].state_bytes / sides["ddp"].state_bytes
            print(f"weights and moments on a rank: {share:.2f} of DDP's {sides['ddp'].state_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main(tyro.cli(Options))

"""What a loss over the whole batch costs: a SimCLR step that embeds twice, against one with `all_gather`.

    torchrun --standalone --nproc_per_node=2 benchmarks/whole_batch.py

All sides train the same network in one process group, step by step in turn. "all_gather" is the usual script: each rank
embeds its share at once, under DDP, and gathers the embeddings of the others inside the loss; it needs the memory of
the whole share. "one" embeds twice with one micro-batch a rank, "cut" with `per_rank` of them. "all_gather again" shows
how much of a difference is noise. Prints ratios of medians.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import tyro
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from turns import in_turn

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import Step
from evenkeel.distributed.world import World
from evenkeel.training.determinism import fix_arithmetic
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.state import State
from evenkeel.training.whole_batch import WholeBatch

SIDES = ("all_gather", "all_gather again", "one", "cut")


@dataclass(frozen=True)
class Options:
    """Compare step times."""

    size: int = 32
    """Samples of each rank in a step."""
    per_rank: int = 4
    """Micro-batches of each rank, of the side that cuts its share."""
    steps: int = 20
    """Steps of each side that are measured."""
    image: int = 32
    """Height and width of the images."""
    reduce: Literal["ring", "tree"] = "ring"
    """Of the sides that embed twice."""


def network() -> nn.Module:
    """ResNet-18 with 128 outputs."""
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=128)


def nt_xent(both: Tensor) -> Tensor:
    """SimCLR's loss of two views of each sample, [samples, 2, width]."""
    z = F.normalize(both.transpose(0, 1).flatten(0, 1), dim=1)
    scores = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
    return F.cross_entropy(scores, torch.arange(len(z), device=z.device).roll(len(both)))


def embed(model: Any, batch: Tensor) -> Tensor:
    """Both views of each sample, [samples, 2, 128]."""
    return torch.stack(model(torch.cat([batch, batch.flip(3)])).chunk(2), 1)


def gathering(options: Options, world: World) -> Iterator[None]:
    """The usual script; one step for each next()."""
    model: nn.Module = network().to(world.device)
    model = DistributedDataParallel(model) if world.launched else model
    batch = torch.randn(options.size, 3, options.image, options.image, device=world.device)
    while True:
        model.zero_grad()
        mine = embed(model, batch)
        everyone = [torch.empty_like(mine) for _ in range(world.world_size)]
        if world.launched:
            dist.all_gather(everyone, mine.detach())
        everyone[world.rank] = mine
        nt_xent(torch.cat(everyone)).backward()  # type: ignore[no-untyped-call]
        yield


def embedding_twice(options: Options, world: World, per_rank: int) -> Iterator[None]:
    """As train.py; one step for each next()."""
    samples = options.size * world.world_size
    plan = Plan(samples, samples, options.size // per_rank, epochs=1)
    state = State(network().to(world.device), [])
    learner = DistributedLoss(WholeBatch(embed, nt_xent), state, world, plan, Config(reduce=options.reduce))
    mine = plan.micro_batches(0, world.rank, world.world_size)
    batches = [torch.randn(m.size, 3, options.image, options.image) for m in mine]
    while True:
        for batch in learner.micro_batches(Step(0, mine, iter(batches))):
            learner.backward(learner(batch))
        yield


def main(options: Options) -> None:
    """Measure and print."""
    fix_arithmetic(exact=True)
    torch.set_num_threads(1)
    world = World.from_environment()
    with world.connected():
        loops = {
            "all_gather": gathering(options, world),
            "all_gather again": gathering(options, world),
            "one": embedding_twice(options, world, 1),
            "cut": embedding_twice(options, world, options.per_rank),
        }
        seconds = in_turn(loops, options.steps, world.device)
        if world.rank == 0:
            base = median(seconds["all_gather"])
            print(f"all_gather: {base * 1e3:.1f} ms a step, {world.world_size} ranks of {options.size} samples")
            for side in SIDES[1:]:
                print(f"{side} / all_gather = {median(seconds[side]) / base:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Options))

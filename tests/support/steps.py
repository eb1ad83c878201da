"""For scripts that are the ranks of a job: the passes of one step, as `train.py` takes them, and what they found."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from evenkeel.config import Config
from evenkeel.data.loader import make_loader
from evenkeel.data.plan import MicroBatch
from evenkeel.data.sampler import ElasticSampler, Step, by_step
from evenkeel.distributed.exits import leave
from evenkeel.distributed.world import World
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.state import State


def passes(model: DistributedLoss, step: int, micro_batches: Sequence[MicroBatch], batches: Iterable[Any]) -> None:
    """Forward and backward; afterwards the gradient of the global batch is in ``.grad``."""
    for batch in model.micro_batches(Step(step, list(micro_batches), iter(batches))):
        model.backward(model(batch))


def training(
    task: Any, state: State, world: World, data: Any, cut: tuple[int, int], epochs: int, workers: int = 0, **how: Any
) -> Iterator[DistributedLoss]:
    """The gradients of each step, before the step is taken; `cut` has the samples of a step and of a micro-batch."""
    sampler = ElasticSampler(data, *cut, num_replicas=world.world_size, rank=world.rank, seed=1)
    batches = make_loader(data, sampler, "train", workers, world.device)
    config, unused = Config(seed=1, **how), task.unused_parameters
    gradients = DistributedLoss(task.loss, state, world, sampler.plan, config, unused_parameters=unused)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, mine, their_batches in by_step(batches, sampler):
            state.clear_gradients()
            passes(gradients, step, mine, their_batches)
            yield gradients


def rank_0_writes(found: Callable[[World], Any], patience: timedelta = timedelta(minutes=10)) -> None:
    """Connect, and write as JSON to the first argument what the call has found on rank 0. `--share-gpu` may follow.
    A rank waits for others at most `patience`."""
    torch.set_num_threads(1)
    world = World.from_environment(share_gpu="--share-gpu" in sys.argv)
    with world.connected(patience):
        result = found(world)
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(result))
    leave(0)

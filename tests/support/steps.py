"""For scripts that are the ranks of a job: the passes of one step, as `train.py` takes them, and what they found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from evenkeel.data.plan import MicroBatch
from evenkeel.data.sampler import Step
from evenkeel.distributed.exits import leave
from evenkeel.distributed.world import World
from evenkeel.training.distributed_loss import DistributedLoss


def passes(model: DistributedLoss, step: int, micro_batches: Sequence[MicroBatch], batches: Iterable[Any]) -> None:
    """Forward and backward; afterwards the gradient of the global batch is in ``.grad``."""
    for batch in model.micro_batches(Step(step, list(micro_batches), iter(batches))):
        model.backward(model(batch))


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

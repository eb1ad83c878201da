"""The passes of one step, as `train.py` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from evenkeel.data.plan import MicroBatch
from evenkeel.data.sampler import Step
from evenkeel.training.distributed_loss import DistributedLoss


def passes(model: DistributedLoss, step: int, micro_batches: Sequence[MicroBatch], batches: Iterable[Any]) -> None:
    """Forward and backward; afterwards the gradient of the global batch is in ``.grad``."""
    for batch in model.micro_batches(Step(step, list(micro_batches), iter(batches))):
        model.backward(model(batch))

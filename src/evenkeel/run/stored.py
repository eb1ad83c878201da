"""Writes what a rank has stored in memory to the disk, without the run's objects: in a child of its keeper."""

from __future__ import annotations

import os
import time

import torch

from ..common.display import say
from ..resilience.memory_checkpoint import SlotCheckpoint, Stored
from .checkpoint import WRITER_TIMEOUT, checkpoints_of
from .manifest import manifest_of
from .saver import RANK_DELAY
from .sharded_checkpoint import write_slots


def write_memory_checkpoint(checkpoint: Stored) -> None:
    """Write it to the run's folder, unless another rank of the node has done so; called in a keeper's child."""
    until = time.monotonic() + WRITER_TIMEOUT
    try:
        if isinstance(checkpoint, SlotCheckpoint):
            write_slots(checkpoint.slots, until)
            return
        time.sleep(RANK_DELAY * int(os.environ.get("LOCAL_RANK", "0")))
        checkpoints, manifest = checkpoints_of(checkpoint.label), manifest_of(checkpoint.label)
        state = torch.load(checkpoint.path, map_location="cpu", weights_only=True, mmap=True)
        checkpoints.save_if_new(state, until, manifest.metrics, manifest.kind)
    except OSError as error:
        say(f"evenkeel: NOT SAVED: {error}; step {checkpoint.step} was in memory only", to_stderr=True)

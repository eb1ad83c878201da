"""--replicate 1: after each step a rank's slot is copied to a rank of another node, so that a lost node costs no step.

The step is over only when the copy is whole. The ranks that are left write it to the disk as they end, beside their own
rows (`run.sharded_checkpoint.write_slots`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.errors import EndedHere
from ..distributed.world import World
from ..resilience.slot_files import SLOT_HEAD, step_in
from .slots import HEAD, clear


class Replica:
    """This rank's copy of another's rows. Every rank makes one at the same time, after the process group.

    Args:
        world: the ranks; torchrun gives those of a node consecutive numbers.
        descriptors: of two files for the copy.
    """

    def __init__(self, world: World, descriptors: Sequence[int]) -> None:
        self._descriptors = list(descriptors)
        shift = max(world.all_gather(world.local_world_size))
        self.possible = 2 * shift <= world.world_size
        """Whether each rank can have another node's; not if one node has more than half of them."""
        self._to, self._from = (world.rank + shift) % world.world_size, (world.rank - shift) % world.world_size
        # of its own: the checkpoint's and the step's collectives must not be mixed with it
        self._group: Any = dist.new_group(backend="gloo") if self.possible else None

    def exchange(self, own: int) -> None:
        """Send a whole slot, by its descriptor, and receive the other rank's over the older copy, or at a resume over
        one that is newer. All must call it."""
        if not self.possible:
            return
        numbers = SLOT_HEAD.unpack(os.pread(own, SLOT_HEAD.size, 0))
        sent, size = torch.tensor(numbers), torch.zeros(len(numbers), dtype=torch.int64)
        self._swap(sent, size)
        step, end, layout, plain = map(int, size.tolist())
        target = min(self._descriptors, key=lambda copy: (step_in(copy) == step, step_in(copy)))
        clear(target)  # not whole from here on
        try:
            os.posix_fallocate(target, 0, end + layout + plain)
        except OSError as error:
            raise EndedHere(f"--replicate 1: no memory for another rank's rows: {error.strerror}") from error
        self._swap(_content(own, sum(numbers[1:])), _content(target, end + layout + plain))
        os.pwrite(target, SLOT_HEAD.pack(step, end, layout, plain), 0)

    def _swap(self, sent: Tensor, received: Tensor) -> None:
        work = dist.isend(sent, self._to, self._group)
        dist.recv(received, self._from, self._group)
        if work:
            work.wait()

    def clear(self) -> None:
        """Store no copy."""
        for each in self._descriptors:
            clear(each)


def _content(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8, offset=HEAD)

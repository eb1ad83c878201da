"""What a keeper must know of slots, files in memory with a rank's last steps in a sharded run (`training.slots`)."""

from __future__ import annotations

import os
import struct

SLOT_HEAD = struct.Struct("<qqqq")
"""The head of a slot: the step (0 while it is not whole), where the tensors end, and the bytes of layout and of plain
data after them."""


def new_slots() -> list[int]:
    """Make the files for the slots of a rank: two for its rows, two for another rank's (--replicate)."""
    return [os.memfd_create("slot") for _ in range(4)]


def step_in(slot: int) -> int:
    """The step of the state in a slot, a descriptor; 0: none is whole."""
    head = os.pread(slot, SLOT_HEAD.size, 0)
    return int(SLOT_HEAD.unpack(head)[0]) if head else 0

"""Random numbers without a state: every seed is a pure function of what it is for.

A saved generator state ties a run to the number of ranks and loader workers that drew from it. Here each
sample, each micro-batch and each set of initial weights gets its own seed from (run seed, purpose, where),
so a checkpoint needs no generator state and any rank can take over any piece of work.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys

import torch


def derive(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit seed for one purpose at one place, e.g. ``derive(seed, "sample", epoch, index)``.

    BLAKE2b of the arguments, so neighbouring places get unrelated seeds; the same on every platform and
    Python. Costs about a microsecond.
    """
    message = purpose.encode() + b"\0" + struct.pack(f"<{1 + len(where)}q", seed, *where)
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators a model or a data set may draw from: torch (all devices), random, and NumPy.

    NumPy's is seeded only where something has imported NumPy, and with 32 bits, all it takes.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)

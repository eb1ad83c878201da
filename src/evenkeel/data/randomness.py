"""Random numbers without state: every seed is a pure function of its purpose.

A saved generator state ties a run to the number of ranks and loader workers that drew from it. Here each sample, each
micro-batch and each set of initial weights has its own seed from (run seed, purpose, place), so checkpoints have no
generator state and any rank can take over any work.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, *where: int) -> int:
    """Return a 63-bit seed for one purpose at one place, e.g. ``derive(seed, "sample", epoch, index)``.

    BLAKE2b of the arguments: unrelated for adjacent places, the same on every platform. Takes about a microsecond.
    """
    message = purpose.encode() + b"\0" + struct.pack(f"<{1 + len(where)}q", seed, *where)
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_host(seed: int) -> None:
    """Seed the CPU generators of torch, Python and NumPy (with the seed's lower 32 bits).

    The numbers are those of `torch.manual_seed`, which also seeds every type of device and takes 150 us; this takes 10.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_task(seed: int, purpose: str) -> None:
    """Seed all generators, on every device, before a method of a task is called.

    Args:
        seed: the run's.
        purpose: "data" for all data sets, so that methods which split the same data at random get parts that do
            not overlap; "weights" for the model; for other methods their names.
    """
    seed_host(derived := derive(seed, purpose))
    torch.manual_seed(derived)


def seed_computation(seed: int, devices: Iterable[torch.device]) -> None:
    """Seed the CPU generators and those of these devices, as `torch.manual_seed` does for all devices."""
    seed_host(seed)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # makes the generators; returns at once the next time
            torch.cuda.default_generators[device.index].manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of the CPU and of initialized GPUs at the end."""
    python, legacy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)

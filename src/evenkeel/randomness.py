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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit seed for one purpose at one place, e.g. ``derive(seed, "sample", epoch, index)``.

    BLAKE2b of the arguments, so neighbouring places get unrelated seeds; the same on every platform and
    Python. Costs about a microsecond.
    """
    message = purpose.encode() + b"\0" + struct.pack(f"<{1 + len(where)}q", seed, *where)
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_host(seed: int) -> None:
    """Seed the generators that a data set draws from, in a loader process or in this one: those of the CPU.

    torch's, Python's, and NumPy's where something has imported NumPy, with 32 bits, all it takes. The streams are those
    of `torch.manual_seed`, which is not called here because it looks for every type of device that torch knows: 150 us
    on torch 2.15, against 10 us for all of this.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_task(seed: int, purpose: str) -> None:
    """Seed all that a method of a task draws from, before it is called, on whatever device.

    Args:
        seed: the run's, so that all ranks and all starts draw the same.
        purpose: "data" for both data sets: where each of the two methods splits the same whole, the parts must not
            overlap. "weights" for the model; the others by their names.
    """
    seed_host(derive(seed, purpose))
    torch.manual_seed(derive(seed, purpose))


def seed_computation(seed: int, devices: Iterable[torch.device]) -> None:
    """Seed all that a model draws from: the generators of the CPU, and those of the devices that compute it.

    Args:
        seed: the same for each of them, as with `torch.manual_seed`.
        devices: of this rank; other ranks' and types that the machine lacks are not touched.
    """
    seed_host(seed)
    for device in devices:
        if device.type == "cuda":
            # before this there are no generators; returns at once where it has been called
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.default_generators[device.index].manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards the generators of the CPU and of GPUs in use are where they were."""
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    python, legacy = random.getstate(), numpy and numpy.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.set_state(legacy)

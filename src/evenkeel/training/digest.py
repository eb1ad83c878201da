"""A 64-bit digest of each tensor, to compare the bits of two runs.

The tensor's bytes are read as 64-bit words. Each word, with its position added in, goes through the finalizer of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), and the results are added up modulo 2**64, so the order of adding, the
device and the size of chunks do not matter. The finalizer is one-to-one, so a change within one word always changes the
digest; any other change is missed with probability 2**-64. It is not a cryptographic hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from .state_dicts import undivided

CHUNK = 1 << 20
"""Words at a time: 8 MiB, so that a large tensor needs little memory besides its own."""

_GAMMA, _FIRST, _SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants, as signed numbers: torch computes little with unsigned ones."""


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor: type, shape and every bit, as 16 hexadecimal digits.

    Computed where they are; the host waits once a device. All ranks gather DTensors (--shard), one after the other.
    """
    values = on_host({name: bit_sum(undivided(tensor)) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        kind = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode()).digest()
        values[name] += int.from_bytes(kind[:8], "big")
    return {name: f"{values[name] % 2**64:016x}" for name in tensors}


def on_host(sums: Mapping[str, Tensor]) -> dict[str, int]:
    """The values of sums by :func:`bit_sum`; the host waits once for each device."""
    values: dict[str, int] = {}
    for device in {tensor.device for tensor in sums.values()}:
        here = {name: tensor for name, tensor in sums.items() if tensor.device == device}
        values.update(zip(here, torch.stack(list(here.values())).tolist(), strict=True))
    return values


@torch.no_grad()
def bit_sum(tensor: Tensor, chunk: int = CHUNK) -> Tensor:
    """The sum of a tensor's mixed words, an int64 scalar on its device; ``chunk`` words at a time."""
    octets = tensor.contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(octets), 8 * chunk):
        part = octets[start : start + 8 * chunk]
        words = torch.zeros(-(-len(part) // 8), dtype=torch.int64, device=tensor.device)
        words.view(torch.uint8)[: len(part)] = part  # copied, because it may lie across words or end within one
        place = torch.arange(start // 8, start // 8 + len(words), device=tensor.device)
        total += _mix(words.add_(place.mul_(_GAMMA))).sum()
    return total


def word_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's words, a scalar on its device. It finds less than a digest, in a thirtieth of the time,
    which counts in the first step after a restart."""
    octets = tensor.flatten().view(torch.uint8)
    if octets.storage_offset() % 8:  # no words begin there
        octets = octets.clone()
    even = len(octets) - len(octets) % 8
    return octets[:even].view(torch.int64).sum() + octets[even:].sum()


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place; multiplication wraps around."""
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # shifted to the right with zeros from the left, where torch would repeat the sign
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words

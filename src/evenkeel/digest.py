"""A number of 64 bits for each tensor that says whether two runs hold the same bits.

The tensor's bytes are read as 64-bit words. Each word, with its place added in, goes through the finalizer of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), and the results are added up, modulo 2**64. Integers add up to the same
in any order, so the digest is that of the tensor on any device and however it is cut into chunks. The finalizer is
one-to-one, so a change within one word always shows; any other, an exchange of two elements for example, shows but for
a chance of 2**-64. It is no cryptographic hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Words at a time: 8 MiB, so that a large tensor needs little memory besides its own."""

_GAMMA, _FIRST, _SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants, as signed numbers: torch computes little with unsigned ones."""


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor: type, shape and every bit, as 16 hexadecimal digits.

    Computed where the tensors are; the host waits once for each device.
    """
    sums = {name: bit_sum(tensor.detach()) for name, tensor in tensors.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in sums.items():
        by_device.setdefault(tensor.device, []).append(name)
    values = {
        name: value
        for names in by_device.values()
        for name, value in zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True)
    }
    return {name: f"{(values[name] + _kind(tensor)) % 2**64:016x}" for name, tensor in tensors.items()}


@torch.no_grad()
def bit_sum(tensor: Tensor, chunk: int = CHUNK) -> Tensor:
    """The sum of a tensor's mixed words, an int64 scalar on its device.

    Args:
        tensor: of any type and shape.
        chunk: words at a time, which does not change the result.
    """
    octets = tensor.contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(octets), 8 * chunk):
        part = octets[start : start + 8 * chunk]
        words = torch.zeros(-(-len(part) // 8), dtype=torch.int64, device=tensor.device)
        words.view(torch.uint8)[: len(part)] = part  # copied, because it may lie across words or end within one
        place = torch.arange(start // 8, start // 8 + len(words), device=tensor.device)
        total += _mix(words.add_(place.mul_(_GAMMA))).sum()
    return total


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place; multiplication wraps around."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words.bitwise_xor_(_shifted(words, shift)).mul_(factor)
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """To the right with zeros from the left, where torch would repeat the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _kind(tensor: Tensor) -> int:
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

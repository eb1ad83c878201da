"""A model's state dict for a file of weights, and its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def cpu_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict on the CPU, for a file that loads anywhere."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def undivided(tensor: Tensor) -> Tensor:
    """A tensor without its graph. All ranks gather a DTensor (--shard), whose class takes a second to import."""
    return getattr(tensor.detach(), "full_tensor", tensor.detach)()


def sha256(weights: Mapping[str, Tensor]) -> str:
    """A fingerprint of a state dict: names, dtypes, shapes and every bit of every tensor."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

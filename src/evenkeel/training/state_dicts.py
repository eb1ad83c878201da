"""State dicts of a model: for a file of weights, its fingerprint, and with --shard this rank's rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def cpu_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict on the CPU, for a file that loads anywhere."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def undivided(tensor: Tensor) -> Tensor:
    """A tensor without its graph. All ranks gather a DTensor (--shard), whose class takes a second to import."""
    return getattr(tensor.detach(), "full_tensor", tensor.detach)()


@torch.no_grad()  # with gradients, to_local() would be an operation of the graph
def local_rows(tensors: Iterable[Any]) -> list[Tensor]:
    """This rank's rows of divided ones; asked for at each step, because torch 2.9 replaces them in the first pass."""
    return [each.to_local() if hasattr(each, "to_local") else each for each in tensors]


def load_weights(model: nn.Module, saved: Mapping[str, Tensor], of: Mapping[str, int]) -> None:
    """Load a state dict. Of divided parameters it has this rank's rows, and all ranks have ``of["model.NAME"]``.

    Raises:
        RuntimeError: it does not fit; on all ranks, whose rows it may be.
    """
    divided = {name: it for name, it in model.named_parameters(remove_duplicate=False) if hasattr(it, "to_local")}
    rest = {name: it for name, it in saved.items() if name not in divided}
    left = model.load_state_dict(rest, strict=not divided)
    wrong = {*left.missing_keys, *left.unexpected_keys} - divided.keys()
    wrong |= {name for name, it in divided.items() if (of.get(f"model.{name}"), *saved[name].shape[1:]) != it.shape}
    if wrong:
        raise RuntimeError(f"other parameters or buffers: {', '.join(sorted(wrong))}")
    if divided:
        torch._foreach_copy_(local_rows(divided.values()), [saved[name] for name in divided])


def sha256(weights: Mapping[str, Tensor]) -> str:
    """A fingerprint of a state dict: names, dtypes, shapes and every bit of every tensor."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

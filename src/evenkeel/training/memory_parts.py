"""How many bytes of a rank's memory each part of a run's state takes: computed from shapes; nothing is allocated."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .ema import local_rows
from .staging import named_tensors

PEAK = "peak"
"""Beside the parts: the most that was in use so far."""


def bytes_of_state(
    model: nn.Module, optimizers: Iterable[Optimizer], ema: bool, rank: int = 0, ranks: int = 1
) -> dict[str, int]:
    """Part of the state -> its bytes on a rank.

    Args:
        model: divided or not.
        optimizers: of its parameters. Before the first step they must be SGD, Adam or AdamW.
        ema: whether there is an average of the weights.
        rank, ranks: whose bytes, if the state is divided among so many ranks. Rank 0 has the most rows.
    """
    of = {p: _rows(p, rank, ranks) * p.shape[1:].numel() * p.element_size() for p in model.parameters()}
    weights, learning = sum(of.values()), sum(size for p, size in of.items() if p.requires_grad)
    moments = sum(_bytes_of(optimizer, of) for optimizer in optimizers)
    return {"weights": weights, "gradients": learning, "optimizer state": moments, "average": weights * ema}


def bytes_of_rank_0(
    model: nn.Module, optimizers: Iterable[Optimizer], blocks: Iterable[nn.Module], ranks: int, ema: bool, bf16: bool
) -> dict[str, int]:
    """The same with --shard on, and last the bytes of the largest block that is gathered.

    Args:
        model, optimizers, ranks, ema: as above, before the first step.
        blocks: modules whose parameters are gathered together; what is in none is one further block.
        bf16: whether blocks are gathered in bfloat16.
    """
    gathered, seen = [0], set[nn.Parameter]()
    for block in [*sorted(blocks, key=lambda it: len(list(it.modules()))), model]:  # inner ones first
        own = set(block.parameters()) - seen
        seen |= own
        gathered.append(sum(p.numel() * (2 if bf16 else p.element_size()) for p in own))
    return {**bytes_of_state(model, optimizers, ema, 0, ranks), "the largest block gathered": max(gathered)}


def peak(devices: Sequence[torch.device]) -> int:
    """The most bytes that this process has used so far: in tensors on its GPUs; on a CPU all of its memory."""
    if devices[0].type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rows(parameter: Tensor, rank: int, ranks: int) -> int:
    rows = parameter.shape[0] if parameter.dim() else 1
    each = -(-rows // ranks)
    return min(each, max(0, rows - rank * each))


def _bytes_of(optimizer: Optimizer, of: dict[nn.Parameter, int]) -> int:
    """Of an optimizer's state: this rank's as it is, before the first step as it will be."""
    if optimizer.state:
        tensors = named_tensors(dict(enumerate(optimizer.state.values()))).values()
        return sum(it.nbytes for it in local_rows([*tensors]))
    return sum(_moments(group) * sum(of[p] for p in group["params"]) for group in optimizer.param_groups)


def _moments(group: dict[str, object]) -> int:
    """Tensors that SGD, Adam or AdamW keep for each parameter."""
    return 2 + bool(group.get("amsgrad")) if "betas" in group else bool(group.get("momentum"))

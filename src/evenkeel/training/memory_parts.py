"""How many bytes of memory each part of a run's state takes, of a rank: as it is, or before there is any."""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .staging import named_tensors

PEAK = "peak"
"""Beside the parts: the most that was in use so far."""


def bytes_of_state(rows: Iterable[Tensor], optimizers: Iterable[Optimizer], ema: bool) -> dict[str, int]:
    """Part of the state -> its bytes on this rank, whose parameters or ``rows`` of them these optimizers have; with
    ``ema`` there is an average of the weights."""
    return _parts({it: it.nbytes for it in rows}, sum(_bytes_of(it.state) for it in optimizers), ema)


def _bytes_of(state: Mapping[Any, Any]) -> int:
    return sum(tensor.nbytes for tensor in named_tensors(dict(enumerate(state.values()))).values())


def _parts(of: dict[Tensor, int], moments: int, ema: bool) -> dict[str, int]:
    weights, learning = sum(of.values()), sum(size for p, size in of.items() if p.requires_grad)
    return {"weights": weights, "gradients": learning, "optimizer state": moments, "average": weights * ema}


def bytes_of_rank_0(
    model: nn.Module, optimizers: Iterable[Optimizer], blocks: Iterable[nn.Module], ranks: int, ema: bool, bf16: bool
) -> dict[str, int]:
    """The same of rank 0, which has the most rows, once --shard has divided a whole model among so many ranks; and last
    the bytes of the largest of the blocks, which are gathered one by one, with ``bf16`` in bfloat16."""
    gathered, seen = [0], set[nn.Parameter]()
    for block in [*sorted(blocks, key=lambda it: len(list(it.modules()))), model]:  # inner ones first
        own = set(block.parameters()) - seen
        seen |= own
        gathered.append(sum(p.numel() * (2 if bf16 else p.element_size()) for p in own))

    def shape(p: Tensor) -> list[int]:
        return [-(-len(p) // ranks), *p.shape[1:]]

    of: dict[Tensor, int] = {p: torch.Size(shape(p)).numel() * p.element_size() for p in model.parameters()}
    moments = sum(bytes_after_a_step(optimizer, shape) for optimizer in optimizers)
    return {**_parts(of, moments, ema), "the largest block gathered": max(gathered)}


def bytes_after_a_step(optimizer: Optimizer, shape: Callable[[Tensor], Sequence[int]]) -> int:
    """Bytes of the state that an optimizer makes in its first step, with parameters of these shapes: a copy takes that
    step on the meta device. What a task's own optimizer raises comes through."""
    groups: list[dict[str, Any]] = [dict(group) for group in optimizer.param_groups]
    trial = copy.copy(optimizer)
    trial.param_groups, trial.state = groups, copy.copy(optimizer.state)
    for group in groups:
        group |= {name: False for name in ("fused", "foreach") if name in group}
        group["params"] = [nn.Parameter(torch.empty(*shape(p), dtype=p.dtype, device="meta")) for p in group["params"]]
        for p in group["params"]:
            p.grad = torch.empty_like(p)
    type(optimizer).step(trial)
    return _bytes_of(trial.state)


def peak(devices: Sequence[torch.device]) -> int:
    """The most bytes that this process has used so far: in tensors on its GPUs; on a CPU all of its memory."""
    if devices[0].type == "cuda":
        return sum(torch.cuda.max_memory_allocated(device) for device in devices)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

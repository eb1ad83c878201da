"""How many bytes of a run's state a rank has with --shard on. Computed; nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer


def bytes_of_rank_0(
    model: nn.Module, optimizers: Iterable[Optimizer], blocks: Iterable[nn.Module], ranks: int, ema: bool, bf16: bool
) -> dict[str, int]:
    """Part of the state -> its bytes on rank 0, which has the most rows; last the largest block that is gathered.

    Args:
        model: not yet divided.
        optimizers: of its parameters.
        blocks: modules whose parameters are gathered together; what is in none is one further block.
        ranks: among which the state is divided.
        ema: whether there is an average of the weights.
        bf16: whether blocks are gathered in bfloat16.
    """
    of = {p: p[: -(-len(p) // ranks)].numel() * p.element_size() for p in model.parameters()}
    gathered, seen = [0], set[nn.Parameter]()
    for block in [*sorted(blocks, key=lambda it: len(list(it.modules()))), model]:  # inner ones first
        own = set(block.parameters()) - seen
        seen |= own
        gathered.append(sum(p.numel() * (2 if bf16 else p.element_size()) for p in own))
    weights, learning = sum(of.values()), sum(size for p, size in of.items() if p.requires_grad)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    moments = sum(_moments(group) * sum(of[p] for p in group["params"]) for group in groups)
    parts = {"weights": weights, "gradients": learning, "moments": moments, "average": weights * ema}
    return {**parts, "the largest block gathered": max(gathered)}


def _moments(group: dict[str, object]) -> int:
    """Tensors that SGD, Adam or AdamW keep for each parameter."""
    return 2 + bool(group.get("amsgrad")) if "betas" in group else bool(group.get("momentum"))

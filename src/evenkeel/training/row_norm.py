"""The norm of a gradient whose rows are on different ranks: the same bits on any number of ranks.

torch's norm of a DTensor adds the ranks' norms, in an order that depends on their number, as do the kernels that add up
a whole tensor. Here the squares of each row are added in float64 by halves, element by element, so that no kernel
chooses an order; then the sums of all rows, in their order in the model, in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def halved(x: Tensor) -> Tensor:
    """The sum over the last dimension, [..., n] -> [...], by element-wise additions of its two halves.

    >>> halved(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    tensor([ 6., 15.])
    """
    if not x.shape[-1]:
        return x.sum(-1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = torch.cat([x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]], -1)
    return x.squeeze(-1)


@torch.no_grad()
def clip_rows(gradients: Sequence[DTensor], max_norm: float) -> Tensor:
    """Scale the gradient down to a 2-norm of at most ``max_norm`` (0: do not scale it); all ranks must call it.

    Args:
        gradients: of all parameters, each divided by rows.

    Returns:
        The norm before scaling, a float32 scalar, the same on every rank.
    """
    mine = [gradient.to_local() for gradient in gradients]
    ranks = gradients[0].device_mesh.size()
    sizes = [-(-gradient.shape[0] // ranks) for gradient in gradients]
    sums = mine[0].new_zeros(sum(sizes), dtype=torch.float64)
    for rows, part in zip(mine, torch.split(sums, sizes), strict=True):
        if rows.numel():
            part[: len(rows)] = halved(rows.double().square_().reshape(len(rows), -1))
    every = sums.new_empty(ranks, len(sums))
    dist.all_gather_into_tensor(every.view(-1), sums, group=gradients[0].device_mesh.get_group())
    columns = torch.split(every, sizes, 1)
    in_order = [rows.reshape(-1)[: gradient.shape[0]] for rows, gradient in zip(columns, gradients, strict=True)]
    norm = halved(torch.cat(in_order)).sqrt()
    if max_norm:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch's clip_grad_norm_
        torch._foreach_mul_(mine, factor.to(mine[0].dtype))
    return norm.float()

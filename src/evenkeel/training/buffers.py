"""A model's buffers (BatchNorm's statistics), live and committed.

The forward passes of a step change the live buffers; the committed ones are those of the last finished step. A
ResNet-50 has 159, and on a GPU launching a kernel for each takes longer than the work. So the committed values of all
buffers of one dtype on one device are views of one flat tensor, which one call copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .checks import check_buffers


class Buffers:
    """The buffers that belong to the state, by name.

    Args:
        live: the buffers.
        model: the model that has them; after the first forward pass it is checked. None: it is not checked.
    """

    def __init__(self, live: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
        self._live, self._unchecked = live, model
        by_kind: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, buffer in live.items():
            by_kind.setdefault((buffer.device, buffer.dtype), {})[name] = buffer
        self.groups = [Group(of_a_kind) for of_a_kind in by_kind.values()]
        self.committed: dict[str, Tensor] = {}
        """The values after the last finished step, by name: views whose memory stays the same."""
        for group in self.groups:
            self.committed.update(zip(group.names, group.committed_views, strict=True))
        self.numel = sum(group.committed.numel() for group in self.groups)

    @torch.no_grad()
    def rewind(self) -> None:
        """Set the live buffers back to the committed ones."""
        self._check()
        for group in self.groups:
            torch._foreach_copy_(group.live, group.committed_views)

    def _check(self) -> None:
        """Check once, after the first forward pass, that it has changed buffers in place."""
        if self._unchecked:
            check_buffers(self._unchecked, self._live, self.committed)
            self._unchecked = None

    @torch.no_grad()
    def accept(self) -> None:
        """Commit the live buffers after they were loaded."""
        for group in self.groups:
            torch._foreach_copy_(group.committed_views, group.live)

    @torch.no_grad()
    def take_changes(self, weight: float) -> list[Tensor]:
        """The changes by a micro-batch, times its weight, for each group a flat float64 tensor. Rewinds the buffers."""
        self._check()
        changes = []
        for group in self.groups:
            torch._foreach_copy_(group.flat_live_views, group.live)
            changes.append((group.flat_live.to(group.wide) - group.base()).double().mul_(weight))
        self.rewind()
        return changes

    @torch.no_grad()
    def new_values(self, changes: Tensor) -> list[Tensor]:
        """The new values, not yet committed: for each group a flat tensor of its dtype.

        Args:
            changes: the sum of :meth:`take_changes` over all micro-batches, in one flat tensor on any device.
        """
        values = []
        parts = torch.split(changes, [group.committed.numel() for group in self.groups])
        for group, part in zip(self.groups, parts, strict=True):
            # rounded, because three thirds of a count may not add up to exactly one
            change = part if group.wide.is_floating_point else part.round()
            value = group.base() + change.to(group.committed.device, group.wide)
            values.append(value.to(group.committed.dtype))
        return values

    @torch.no_grad()
    def commit(self, values: Sequence[Tensor], skip: Mapping[torch.device, Tensor]) -> None:
        """Commit new values, flat for each group, except on devices whose ``skip``, a boolean scalar, is true."""
        for group, value in zip(self.groups, values, strict=True):
            group.committed.copy_(torch.where(skip[group.committed.device], group.committed, value))
        self.rewind()


class Group:
    """Buffers of one dtype on one device, flat. Complex numbers are pairs of real ones."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.names, self.live = list(live), list(live.values())
        self.committed, self.committed_views = _flat(self.live)
        self.flat_live, self.flat_live_views = _flat(self.live)  # memory for `take_changes`
        self.wide = torch.float64 if self.committed.is_floating_point() else torch.int64
        """The dtype in which changes are computed; integers stay exact in it."""

    def base(self) -> Tensor:
        """The committed values in the wide dtype, to subtract from new ones; 0 for infinite ones (a mask, a first
        minimum), because inf - inf is NaN."""
        values = self.committed.to(self.wide)
        return torch.where(values.isfinite(), values, 0)


def _flat(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A flat copy of tensors, and its parts as views with their shapes."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat, views

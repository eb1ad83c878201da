"""A model's buffers (BatchNorm's statistics), live and committed, a group of them at a time.

The forward passes of a step move the live buffers about; the committed ones are those of the last finished step. A
ResNet-50 has 159, and on a GPU a kernel for each of them takes longer than what it computes. So the committed
values of all buffers of one type on one device are views into one flat tensor, and one call copies all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Buffers:
    """The buffers that belong to the state.

    Args:
        live: the model's own, by name.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, buffer in live.items():
            by_kind.setdefault((buffer.device, buffer.dtype), []).append(name)
        self.groups = [Group({name: live[name] for name in names}) for names in by_kind.values()]
        """Those of one type on one device each."""
        self.committed: dict[str, Tensor] = {}
        """The values after the last finished step, by name: views, whose memory stays the same."""
        for group in self.groups:
            self.committed.update(zip(group.names, group.committed_views, strict=True))
        self.numel = sum(group.committed.numel() for group in self.groups)
        """Numbers in all."""

    @torch.no_grad()
    def rewind(self) -> None:
        """Put the live buffers back to where the step began."""
        for group in self.groups:
            torch._foreach_copy_(group.live, group.committed_views)

    @torch.no_grad()
    def accept(self) -> None:
        """Take the live buffers, which have been loaded, for committed ones."""
        for group in self.groups:
            torch._foreach_copy_(group.committed_views, group.live)

    @torch.no_grad()
    def take_changes(self, weight: float) -> list[Tensor]:
        """What a micro-batch has changed, and rewind.

        Args:
            weight: factor on the changes.

        Returns:
            For each group the changes of all buffers, flat, in float64.
        """
        changes = []
        for group in self.groups:
            torch._foreach_copy_(group.moved_views, group.live)
            change = group.moved.to(group.wide) - group.committed.to(group.wide)
            # where nothing changed, an infinite value (a mask, say) would give inf - inf
            changes.append(torch.where(group.moved == group.committed, 0, change).double().mul_(weight))
        self.rewind()
        return changes

    @torch.no_grad()
    def moved_by(self, changes: Tensor) -> list[Tensor]:
        """New values, not committed yet.

        Args:
            changes: the sum of what :meth:`take_changes` gave for all micro-batches, flat, on any device.

        Returns:
            For each group the values of all buffers, flat, in their type.
        """
        parts = torch.split(changes, [group.committed.numel() for group in self.groups])
        values = []
        for group, part in zip(self.groups, parts, strict=True):
            # rounded, because thirds of one count need not add up to exactly one
            change = part if group.wide.is_floating_point else part.round()
            moved = group.committed.to(group.wide) + change.to(group.committed.device, group.wide)
            values.append(moved.to(group.committed.dtype))
        return values

    @torch.no_grad()
    def commit(self, values: Sequence[Tensor], bad: Mapping[torch.device, Tensor]) -> None:
        """Make new values those of the state, and of the model.

        Args:
            values: for each group, flat.
            bad: a boolean scalar on each device; where it is true, all stays as it is.
        """
        for group, value in zip(self.groups, values, strict=True):
            group.committed.copy_(torch.where(bad[group.committed.device], group.committed, value))
        self.rewind()


class Group:
    """Buffers of one type on one device, in one flat tensor. Complex numbers are pairs of real ones in it.

    Args:
        live: the model's own, by name.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.names, self.live = list(live), list(live.values())
        self.committed, self.committed_views = _flat(self.live)
        self.moved, self.moved_views = _flat(self.live)
        self.wide = torch.float64 if self.committed.is_floating_point() else torch.int64
        """The type in which changes are computed; whole numbers stay exact in it."""


def _flat(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A copy of tensors in one, and its parts as views of their shapes."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat, views

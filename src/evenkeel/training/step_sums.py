"""What a step adds up besides gradients: the loss, its named parts and the changes of the model's buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..data.plan import MicroBatch
from ..distributed.reduction import Reduction
from ..distributed.tree import Fold, Node
from .buffers import Buffers


@dataclass
class Pass:
    """A micro-batch on its way through the model, forward and backward."""

    batch: Any  # as it was loaded
    micro_batch: MicroBatch
    weight: float  # its samples / the step's samples
    last: bool = False  # this rank's last one of the step: its backward pass also reduces the gradients
    part_values: Tensor | None = None  # of its loss, of shape [parts], if that has named parts
    contribution: Tensor = field(default_factory=partial(torch.zeros, ()))  # its mean loss times its weight
    backward_calls: int = 0

    def loss_of(self, output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """The loss in the result of `ModelWithLoss`; notes its parts."""
        loss, self.part_values = output if isinstance(output, tuple) else (output, None)
        return loss


class StepSums:
    """The sums of one step over all micro-batches of all ranks: loss, parts and changes, in a flat float64 tensor.

    `part_names`, the same on all ranks, are known when the first step's gradients have been reduced; before, None.
    """

    def __init__(
        self, reduction: Reduction, buffers: Buffers, device: torch.device, part_names: tuple[str, ...] | None = None
    ) -> None:
        self._reduction, self._buffers, self._device, self.part_names = reduction, buffers, device, part_names
        self._mine = Fold[Tensor](Tensor.add_)  # of this rank's micro-batches
        self._wait: Callable[[], Tensor] | None = None  # for the sum over all ranks, once it has begun
        self._total: Tensor | None = None

    def summands(self, done: Pass) -> Tensor:
        """What a micro-batch adds, as a tensor like the sums. Rewinds the buffers."""
        named = [] if done.part_values is None else [(done.part_values * done.weight).double()]
        parts = [done.contribution.double().reshape(1), *named, *self._buffers.take_changes(done.weight)]
        placed = [part.to(self._device) for part in parts]
        return torch.cat(placed) if len(placed) > 1 else placed[0]

    def add(self, micro_batch_id: int, summands: Tensor) -> None:
        """Take a result of :meth:`summands`, in the order of micro-batches."""
        self._mine.push(Node(0, micro_batch_id), summands)

    def begin_total(self) -> Callable[[], Tensor]:
        """Begin to add up over the ranks, all of which must call it. Returns a function that waits for the sums."""
        if self._wait is None:
            numel = 1 + len(self.part_names or ()) + self._buffers.numel
            self._wait = self._reduction.sum_small(self._mine, numel)
        return self._wait

    def total(self) -> Tensor:
        """The sums; all ranks must call it."""
        if self._total is None:
            self._total = self.begin_total()()
        return self._total

    def new_buffers(self) -> list[Tensor]:
        """New values of the model's buffers, flat, for each of its groups: changed by the mean change over all
        micro-batches of all ranks. Without buffers nothing is exchanged."""
        first = 1 + len(self.part_names or ())
        return self._buffers.new_values(self.total()[first:]) if self._buffers.groups else []

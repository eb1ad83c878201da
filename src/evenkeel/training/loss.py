"""A task's loss and its model in one module, which DDP wraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..common.errors import EndedHere, seen_at
from ..distributed.collectives import divided_weight_error, no_collectives
from .checks import checked_losses, same_parts, takes
from .precision import Precision, autocast
from .task import Losses

LossFunction: TypeAlias = Callable[..., Losses]
"""(model, batch) -> the mean loss of the batch, perhaps with its parts; with a parameter `step` it gets that number."""


class ModelWithLoss(nn.Module):
    """The model and its loss in one module, which DDP wraps; called with a batch, or with None on an idle rank.

    Args:
        model: passed to the loss function.
        loss: (model, batch) -> the batch's mean loss. With a parameter `step` it gets the step's number.
        precision: of forward.
        network: the part of the model that learns from this loss; default: all of it.
        unused_parameters: whether some parameters get no gradient in some steps.
        collectives: whether the loss may call collectives.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        precision: Precision = "fp32",
        network: nn.Module | None = None,
        unused_parameters: bool = False,
        collectives: bool = False,
    ) -> None:
        super().__init__()
        self.model = network or model
        self._full_model = (model,) if network else ()  # a tuple, so that DDP sees the network's parameters only
        self.function, self._precision, self._collectives = loss, precision, collectives
        self._takes_step = takes(loss, "step")
        self.step = 0
        """The number of the step, from 0."""
        self.seen_part_names: list[tuple[str, ...]] = []
        """Names of the parts that the loss function returns with the loss, once it has been called. A list, which
        replicas of DataParallel share."""
        # not in `forward`, because a replica of DataParallel has no parameters
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._idle: nn.Parameter | None = None
        """With `unused_parameters`: the parameter that an idle rank's zero depends on. If that were the model's, those
        that no rank has used would get a gradient of 0, and momentum would change them."""
        if unused_parameters:
            zeros = (p.new_zeros(()) for p in self.model.parameters() if p.requires_grad)
            self._idle = nn.Parameter(next(zeros, torch.zeros(())))

    def forward(self, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        """The batch's mean loss; for None a zero. The gradient of that is an exact zero for every parameter; if some
        may be unused, no parameter gets one. Parts of a loss are returned too, of shape [parts], without a gradient."""
        if batch is None:
            if self._idle is not None:
                return self._idle * 0
            sums = [p.sum() for p in self.parameters() if p.requires_grad]
            return torch.stack([each.to(sums[0].device) for each in sums]).sum() * 0
        first_call = not self.seen_part_names
        checks_backward = first_call and not self._has_gradients()  # model() may have left some
        with self.computing("loss()") as model:  # here, so that every replica has it
            returned = self.function(model, batch, **({"step": self.step} if self._takes_step else {}))
        with seen_at(self.function):
            if checks_backward and self._has_gradients():
                raise EndedHere("loss() calls backward(): leave that out, because the training loop calls it")
            loss, parts = checked_losses(returned)
            if hasattr(loss, "to_local"):
                raise divided_weight_error()
            if first_call:
                self.seen_part_names.append(tuple(parts))
            same_parts(self.seen_part_names[0], tuple(parts))
        loss = loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss
        return (loss, torch.stack([part.to(loss) for part in parts.values()])) if parts else loss

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.model.parameters())

    @contextmanager
    def computing(self, what: str) -> Iterator[nn.Module]:
        """The context of a forward pass in a task's method; yields the model."""
        with autocast(self._precision, self._device_type), no_collectives("" if self._collectives else what):
            yield self._full_model[0] if self._full_model else self.model

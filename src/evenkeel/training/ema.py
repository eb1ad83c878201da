"""An exponential moving average of the weights (EMA), which is often better on test data than the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import Refusal
from .buffers import Buffers
from .determinism import multiply
from .state_dicts import load_weights, local_rows


class Average:
    """A copy of a model with averages of the parameters that learn, the model's other ones and its committed buffers.

    It is a separate model, so evaluation does not touch the live one, which another thread may be saving. At step t
    the decay is at most (1 + t) / (10 + t), so the random initial weights are soon forgotten. ``on_meta``: it gets its
    values when it is divided (--shard).
    """

    def __init__(self, model: nn.Module, decay: float, buffers: Buffers, on_meta: bool = False) -> None:
        whole = model.parameters() if on_meta else ()
        meta = {id(it): nn.Parameter(torch.empty_like(it, device="meta"), False) for it in whole}
        self.model = frozen_copy(model, "--ema", meta)
        self.decay, self._model = decay, model
        self._learn = [it.requires_grad for it in model.parameters()]
        self.divide()
        mine = dict(self.model.named_buffers(remove_duplicate=False))
        self._buffers = [([mine[name] for name in group.names], group.committed_views) for group in buffers.groups]

    def divide(self) -> None:
        """List the parameters; again when they have become DTensors (--shard), of which this rank has its rows."""
        pairs = list(zip(self._model.parameters(), self.model.parameters(), self._learn, strict=True))
        self._pairs = [(live, mean) for live, mean, learns in pairs if learns]
        self._others = [(live, mine) for live, mine, learns in pairs if not learns]  # infinite, float8 or integers

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update with the weights and committed buffers after a step, counted from 1; not if ``skip``, a boolean scalar
        on the device, is true."""
        weight = torch.where(skip, 0.0, 1 - min(self.decay, (1 + step) / (10 + step))).float()
        live, mean = map(local_rows, zip(*self._pairs, strict=True))
        change = torch._foreach_sub(live, mean)
        multiply(change, weight)
        torch._foreach_add_(mean, list(change))
        self._copy_others()
        for mine, committed in self._buffers:
            torch._foreach_copy_(mine, committed)

    @torch.no_grad()
    def _copy_others(self) -> None:
        if self._others:  # after_step() may change them
            live, mine = map(local_rows, zip(*self._others, strict=True))
            torch._foreach_copy_(mine, live)

    def state_dict(self) -> dict[str, Tensor]:
        """The live averages, or this rank's rows, by the names of the parameters. The buffers are the model's."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        live = {name: it for name, it in self.model.state_dict(keep_vars=True).items() if name in parameters}
        return dict(zip(live, local_rows(live.values()), strict=True))

    def load_state_dict(self, saved: Mapping[str, Tensor], model: Mapping[str, Tensor], of: Mapping[str, int]) -> None:
        """Load the averages, and the buffers from the model's state dict of the same step; see `load_weights`."""
        load_weights(self.model, {**model, **saved}, of)
        self._copy_others()  # older checkpoints have averages of these too, of which an infinite one is NaN


def averaged(captured: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The weights to use from a committed state: the averages, if it has any, with the model's buffers."""
    return {**captured["model"], **captured.get("ema", {})}


def frozen_copy(model: nn.Module, what: str, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model in evaluation mode, whose parameters require no gradient. ``memo``: what it has instead
    of copies, by id of what the model has.

    Raises:
        Refusal: the model cannot be copied, which `what` needs: an option or a method of the task.
    """
    try:
        return copy.deepcopy(model, memo).requires_grad_(False).eval()
    except RuntimeError as error:
        raise Refusal(
            f"{what}: the model cannot be copied ({str(error).split('. ')[0]}); if it uses the old "
            f"torch.nn.utils.weight_norm, use torch.nn.utils.parametrizations.weight_norm, or leave {what} out"
        ) from error

"""An exponential moving average of the weights (EMA): often better on test data than the weights themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .arithmetic import multiply
from .buffers import Buffers
from .errors import Refusal


class Average:
    """A copy of a model whose parameters are averages over the steps and whose buffers are the model's.

    It is a model of its own, so that to evaluate it touches nothing of the live one, which another thread may just be
    saving.

    Args:
        model: the live model, on its device.
        decay: how much of the average a step keeps, 0 .. 1. At step t it is at most (1 + t) / (10 + t), so that the
            random start is forgotten soon; that is a function of the step, and so no state.
        buffers: those of the live model that belong to the state.

    Raises:
        Refusal: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float, buffers: Buffers) -> None:
        self.decay = decay
        self.model = _copied(model).requires_grad_(False).eval()
        self._live: list[Tensor] = list(model.parameters())
        self._mean: list[Tensor] = list(self.model.parameters())
        mine = dict(self.model.named_buffers())
        self._buffers = [([mine[name] for name in group.names], group.committed_views) for group in buffers.groups]

    @torch.no_grad()
    def update(self, step: int, bad: Tensor) -> None:
        """Take in the weights and the committed buffers after a step.

        Args:
            step: its number, counted from 1.
            bad: a boolean scalar on the device; where it is true the average stays as it is.
        """
        weight = torch.where(bad, 0.0, 1 - min(self.decay, (1 + step) / (10 + step))).float()
        change = torch._foreach_sub(self._live, self._mean)
        multiply(change, weight)
        torch._foreach_add_(self._mean, list(change))
        for mine, committed in self._buffers:
            torch._foreach_copy_(mine, committed)

    def state_dict(self) -> dict[str, Tensor]:
        """The live averages by the names of the model's parameters. Without buffers, which are the model's."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in parameters}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
        """Become what :meth:`state_dict` gave.

        Args:
            saved: the averages.
            model: the state dict of the model then, for the buffers.
        """
        self.model.load_state_dict({**model, **saved})


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise Refusal(
            f"--ema: the model cannot be copied ({str(error).split('. ')[0]}); the old torch.nn.utils.weight_norm is "
            "such a case, and torch.nn.utils.parametrizations.weight_norm is not; change it, or leave --ema out"
        ) from error


def averaged(captured: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The weights to use out of a committed state: the averaged ones, where there are any, and the buffers."""
    return {**captured["model"], **captured.get("ema", {})}

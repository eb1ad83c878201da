"""Steps whose loss or gradient is NaN or infinite: found without a wait, and never taken.

After the reduction every rank holds the same gradient, so all find the same and need not ask each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .errors import Ended


class NonFinite(Ended):
    """A step that is not finite. It has changed nothing.

    Args:
        step: its number, counted from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss or the gradient of step {step} is not finite; lower --lr, set --clip-norm, or leave such steps "
            "out with --on-nonfinite skip"
        )


def decides_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer can leave a step out without an answer to the host: fused ones can."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def step_unless(bad: Tensor | bool, optimizer: Optimizer) -> None:
    """Take an optimizer's step, or leave all as it is.

    Args:
        bad: a boolean scalar on the device, by which a fused optimizer decides there, with the attributes that
            `torch.amp.GradScaler` gives it; or the answer, for all others.
        optimizer: its gradients are set.
    """
    if isinstance(bad, Tensor):
        fused: Any = optimizer
        fused.found_inf, fused.grad_scale = bad.float(), None
    elif bad:
        return
    if isinstance(optimizer, SGD) and decides_on_device(optimizer):
        _begin_momentum(optimizer)
    optimizer.step()


def _begin_momentum(optimizer: SGD) -> None:
    """Give parameters with their first gradient a momentum of zero, from which the first step is the same.

    torch's fused SGD leaves it unset in a step that is left out, and fails where some have one and some have not.
    """
    with_momentum = [group for group in optimizer.param_groups if group["momentum"]]
    if len(optimizer.state) == sum(len(group["params"]) for group in with_momentum):
        return  # all have theirs, as after any but the first step
    for group in with_momentum:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Verdict:
    """Whether the last step was left out, known to the host without waiting for what is queued behind it.

    Args:
        device: where that is decided.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._answer = torch.zeros((), dtype=torch.bool, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def ask(self, bad: Tensor) -> None:
        """Send for the answer.

        Args:
            bad: a boolean scalar on the device.
        """
        self._answer.copy_(bad, non_blocking=True)
        if self._arrived:
            self._arrived.record(torch.cuda.current_stream(self._device))

    @property
    def known(self) -> bool:
        """Whether the answer is here."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def take(self) -> bool:
        """Wait for the answer; it is given once, and False afterwards."""
        if self._arrived:
            self._arrived.synchronize()
        bad = bool(self._answer)
        self._answer.fill_(False)
        return bad

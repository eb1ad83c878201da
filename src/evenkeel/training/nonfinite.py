"""Steps whose loss or gradient is NaN or infinite: skipped on the device, without making the host wait.

Every rank has the same reduced gradient, so all of them make the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..common.errors import Ended
from .precision import Scaler


class NonFinite(Ended, FloatingPointError):  # noqa: N818
    """A step, counted from 1, was not finite. It has changed nothing."""

    def __init__(self, step: int) -> None:
        too_large = ", or steps that are too large: lower --lr or set --clip-norm, with --fresh" if step > 1 else ""
        super().__init__(
            f"the loss or the gradient of step {step} is not finite: a bad sample or a bug in loss(){too_large}; "
            "--on-nonfinite skip skips such steps"
        )


class Decision(NamedTuple):
    """What becomes of a step; an undone one is not counted, and ends the run.

    a step that is             nonfinite  overflow  failed   counted  weights  then
    finite                     -          -         -        yes      change
    too large for float16      yes        yes       -        yes      stay     the scale is halved
    not finite, skipped        yes        -         yes      yes      stay     `State.skipped`
    not finite otherwise       yes        -         yes      undone   stay     `NonFinite`, in `State.settle`
    """

    nonfinite: Tensor
    overflow: Tensor | None
    failed: Tensor
    skip: Tensor | bool  # as `nonfinite`, but a bool if the host decides


def decide(
    norm: Tensor, loss: Tensor | None, scaler: Scaler | None, optimizers: Sequence[Optimizer], by_host: bool
) -> Decision:
    """Decide by the norm of a step's gradient, and with a scaler by its loss; both are scalars on one device. The host
    decides, and waits for a GPU, with `by_host` or if some optimizer cannot skip a step on the device."""
    nonfinite = failed = ~norm.isfinite()
    overflow = None
    if scaler:
        assert loss is not None
        overflow = scaler.overflow(norm, loss)
        failed = nonfinite & ~overflow
    on_device = norm.device.type != "cpu" and not by_host and all(map(decides_on_device, optimizers))
    return Decision(nonfinite, overflow, failed, nonfinite if on_device else bool(nonfinite))


def decides_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer can skip a step without the host: a fused one, but not SGD with dampening."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return fused and not any(group.get("dampening") for group in optimizer.param_groups)


def step_unless(skip: Tensor | bool, optimizer: Optimizer) -> None:
    """Take an optimizer's step unless ``skip``: a tensor, if the fused optimizer decides on the device, else a bool."""
    if isinstance(skip, Tensor):
        fused: Any = optimizer
        fused.found_inf, fused.grad_scale = skip.float(), None  # as `torch.amp.GradScaler` sets them
    elif skip:
        return
    if isinstance(optimizer, SGD) and decides_on_device(optimizer):
        _begin_momentum(optimizer)
    optimizer.step()


def _begin_momentum(optimizer: SGD) -> None:
    """Give parameters with their first gradient a momentum of zero; without dampening the first step is the same.

    torch's fused SGD leaves it unset in a skipped step, and fails if only some parameters have one.
    """
    with_momentum = [group for group in optimizer.param_groups if group["momentum"]]
    if len(optimizer.state) == sum(len(group["params"]) for group in with_momentum):
        return
    for group in with_momentum:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Verdict:
    """Tells the host later a boolean that the device has decided, without waiting for work queued after it."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._answer = torch.zeros((), dtype=torch.bool, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def ask(self, answer: Tensor) -> None:
        """Begin to copy a boolean scalar from the device."""
        self._answer.copy_(answer, non_blocking=True)
        if self._arrived:
            self._arrived.record(torch.cuda.current_stream(self._device))

    @property
    def immediate(self) -> bool:
        """Whether the answer is there at once: of a CPU. A GPU's may be there on one rank and not yet on another, and
        they must do the same."""
        return self._arrived is None

    def pop(self) -> bool:
        """Wait for the answer and clear it: the next call returns False."""
        if self._arrived:
            self._arrived.synchronize()
        answer = bool(self._answer)
        self._answer.fill_(False)
        return answer

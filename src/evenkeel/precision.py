"""How many bits the forward and backward passes compute with, and the loss scaling that float16 needs.

Parameters, their gradients after the reduction and the optimizers stay in float32. Under autocast torch computes each
operation of the passes in the type that suits it (https://docs.pytorch.org/docs/stable/amp.html).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from .arithmetic import multiply
from .config import FLOOR

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """The context of a forward pass and its loss, or of the metrics."""
    if precision not in TYPES:
        return nullcontext()
    return torch.autocast(device_type, TYPES[precision])


def substitute(precision: Precision, device: torch.device) -> str:
    """What is computed instead where a device has no such arithmetic, in a line; empty where it has."""
    if device.type != "cuda":
        wanting = precision == "tf32"
        return f"--precision tf32: a {device.type.upper()} has no TF32 and computes in float32" if wanting else ""
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return ""
    old = {
        "tf32": "--precision tf32: this GPU has no TF32 and computes in float32",
        "bf16": "--precision bf16: this GPU only emulates bfloat16, which is slow; it has fp16",
    }
    return old.get(precision, "")


class Scaler:
    """float16's loss scaling, by the rule of `torch.amp.GradScaler`: half after an overflow, double after a while.

    Small gradients would be zero in float16, so the loss is multiplied by a scale first and the gradient divided by it
    afterwards. A scale too large shows as an infinite gradient; that step is left out. What GradScaler decides on each
    rank by itself is decided here from the reduced gradient, so all ranks decide alike. All of it is on the device and
    part of the committed state. The scale is a power of two: no bit of a sum depends on it.

    Args:
        device: of the gradients.
        scale: the first one, a power of two.
        interval: steps without an overflow after which it is doubled.
    """

    def __init__(self, device: torch.device, scale: float = 65536.0, interval: int = 2000) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.interval = interval
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # steps since it last changed
        self.overflows = torch.zeros((), dtype=torch.int64, device=device)
        """Steps of the run that were left out."""

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale. After the reduction, before their norm is taken."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        multiply(gradients, self.scale.reciprocal())

    @torch.no_grad()
    def overflow(self, norm: Tensor, loss: Tensor) -> Tensor:
        """Whether the scale is to blame for a step that is not finite: not where the loss is NaN or infinite itself,
        and not at the least scale. A boolean scalar on the device.

        Args:
            norm: the gradient's.
            loss: the step's mean loss, unscaled.
        """
        return ~norm.isfinite() & loss.isfinite() & (self.scale > FLOOR)

    @torch.no_grad()
    def update(self, overflow: Tensor, good: Tensor) -> None:
        """Choose the next step's scale; one that was neither leaves it as it is."""
        scale, steps = self.scale.clone(), self._good.clone()
        torch._amp_update_scale_(scale, steps, overflow.float(), 2.0, 0.5, self.interval)
        judged = overflow | good
        self.scale.copy_(torch.where(judged, scale, self.scale))
        self._good.copy_(torch.where(judged, steps, self._good))
        self.overflows.add_(overflow)

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors."""
        return {"scale": self.scale, "good": self._good, "overflows": self.overflows}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Become what :meth:`state_dict` gave."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

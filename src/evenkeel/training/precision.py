"""The precision of the forward and backward passes, and the loss scaling that float16 needs.

Parameters, reduced gradients and optimizers stay in float32; autocast chooses the type of each operation in the passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from ..config import FLOOR
from .determinism import multiply

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """The context of a forward pass and its loss, or of the metrics."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device_type, types[precision]) if precision in types else nullcontext()


def substitute(precision: Precision, device: torch.device) -> str:
    """A message if --precision is tf32 and the device has none and computes in float32 instead; else empty."""
    if precision != "tf32" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        return ""
    name = "GPU of this kind" if device.type == "cuda" else "CPU"
    return f"--precision tf32: a {name} has no TF32 and computes in float32"


class Scaler:
    """float16's loss scaling: halved after an overflow, doubled after ``interval`` steps without one.

    Small gradients would be zero in float16, so the loss is multiplied by a scale and the gradient divided by it. A
    scale too large makes the gradient infinite, and that step is skipped. `torch.amp.GradScaler` decides this on each
    rank; here the reduced gradient decides, on the device, so all ranks agree. The scale is a power of two, so no bit
    of a sum depends on it.
    """

    def __init__(self, device: torch.device, scale: float = 65536.0, interval: int = 2000) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.interval = interval
        self._good = torch.zeros((), dtype=torch.int32, device=device)  # steps since the scale last changed
        self.overflows = torch.zeros((), dtype=torch.int64, device=device)
        """Steps skipped since the run began."""

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the reduced gradients by the scale, before their norm is computed."""
        multiply([p.grad for p in parameters if p.grad is not None], self.scale.reciprocal())

    @torch.no_grad()
    def overflow(self, norm: Tensor, loss: Tensor) -> Tensor:
        """Whether a gradient that is not finite is due to the scale: the (unscaled) loss is finite, and the scale is
        not the smallest. A boolean scalar on the device."""
        return ~norm.isfinite() & loss.isfinite() & (self.scale > FLOOR)

    @torch.no_grad()
    def update(self, overflow: Tensor, good: Tensor) -> None:
        """Choose the next step's scale. A step that neither overflowed nor was good does not change it."""
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
        """Load the result of :meth:`state_dict`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])

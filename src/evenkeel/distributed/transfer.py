"""Copy batches to the GPU while it computes.

A copy on the computing stream waits for all earlier work. On a separate stream a micro-batch arrives while the previous
one is computed, because the host is ahead by most of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.batch import to_device


class Transfer:
    """Copies batches to the device of the model's first layer; does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make: Any = torch.cuda.Stream  # its constructor has no types
        self._stream: torch.cuda.Stream | None = make(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device, for use in the current stream."""
        if self._stream is None:
            return to_device(batch, self.device)
        moved = to_device(batch, self.device, self._copy)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return moved

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_nested or tensor.layout is not torch.strided:  # has not all operations on its memory
            return tensor.to(self.device, non_blocking=True)
        # pinned, for only then the copy does not wait; `DataLoader` does not look into dataclasses, for example
        if type(tensor) is Tensor and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self.device, non_blocking=True)
        moved.record_stream(torch.cuda.current_stream(self.device))  # keeps its memory from the next batch until then
        return moved

"""Batches to the device, while it computes.

A GPU does what it is told one after another: a copy in the stream that computes waits for all that the host has
launched before. The host is ahead by most of a step, so with a stream of its own a micro-batch arrives while the one
before is computed. Nothing is fetched before it is asked for, so there is nothing to clear up after the last one, an
error or a stop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .data import to_device, with_parts


class Transfer:
    """Brings batches of all kinds to a device; on the CPU they are there.

    Args:
        device: of the model's first layer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make: Any = torch.cuda.Stream  # its constructor has no types
        self._stream: torch.cuda.Stream | None = make(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """The batch with its tensors on the device, as `to_device` gives it; may be used in the current stream."""
        if self._stream is None:
            return to_device(batch, self.device)
        computing = torch.cuda.current_stream(self.device)
        moved = self._moved(batch, self._stream, computing)
        computing.wait_stream(self._stream)
        return moved

    def _moved(self, batch: Any, copying: torch.cuda.Stream, computing: torch.cuda.Stream) -> Any:
        if isinstance(batch, Tensor) and batch.device.type == "cpu":
            with torch.cuda.stream(copying):
                moved = _pinned(batch).to(self.device, non_blocking=True)
            moved.record_stream(computing)  # its memory is given to no other batch while it is computed with
            return moved
        if isinstance(batch, Tensor) or callable(getattr(batch, "to", None)):  # which knows its tensors, and we do not
            return to_device(batch, self.device)
        return with_parts(batch, lambda part: self._moved(part, copying, computing))


def _pinned(tensor: Tensor) -> Tensor:
    """In memory that a GPU can read by itself. `DataLoader` does not look into dataclasses, for example."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()

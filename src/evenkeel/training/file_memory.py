"""Memory for the whole tensors of a model that is too large for one process, in files that have no name.

The kernel writes their pages to the disk, and frees them, when it needs memory; so they are no part of what a process
must have. A file is deleted with its tensor, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

SMALL = 1 << 16
"""Bytes of a tensor for which a file is not worth it."""


def on_disk(shape: Sequence[int], dtype: torch.dtype, folder: Path) -> Tensor:
    """A contiguous tensor without values, in a file in this folder; in ordinary memory if that cannot be."""
    size = prod(shape) * dtype.itemsize
    if size >= SMALL:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # room that is missing later would be a SIGBUS
                name = f"/proc/self/fd/{file.fileno()}"
                return torch.from_file(name, shared=True, size=prod(shape), dtype=dtype).view(*shape)
        except (OSError, RuntimeError):
            pass  # a folder of somebody else, or a full disk
    return torch.empty(tuple(shape), dtype=dtype)

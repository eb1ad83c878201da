"""Keep the memory that the C library frees for the next step; recognise out-of-memory errors."""

from __future__ import annotations

import ctypes
import errno
import os

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt in <malloc.h>."""

KEPT = 1 << 30
"""Bytes of freed memory that the process keeps; also the size from which a block goes back to the kernel."""

SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",  # torch's allocator on the CPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory; return whether it will. No result depends on it, and loader processes inherit it.

    glibc returns a large block to the kernel as soon as it is freed, and each step asks for the same blocks again. The
    kernel then has to clear every page, which takes a tenth to a third of a step on a CPU.
    """
    if any(name in os.environ for name in SET_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(number, KEPT) == 1 for number in (TRIM_THRESHOLD, MMAP_THRESHOLD))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host is out of memory; torch has no common type for that."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)

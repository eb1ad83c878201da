"""Keeps the memory of one step for the next.

glibc gives a large block back to the kernel as soon as it is free, and each step asks for the same blocks again; then
the kernel has to find and clear every page, and that takes a tenth to a third of a step on a CPU. With larger
thresholds the pages stay. No number depends on it. Loader processes inherit it. (torch keeps a GPU's memory itself.)
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt's parameters in <malloc.h>."""

KEPT = 1 << 30
"""Bytes that stay with the process although they are free; the size of a block that is not kept."""

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""With these a user has decided otherwise."""


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory. False where it is not glibc, or where the environment has set it."""
    if any(name in os.environ for name in VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(number, KEPT) == 1 for number in (TRIM_THRESHOLD, MMAP_THRESHOLD))

"""Keep the memory that the C library frees for the next step; how much is left; recognise out-of-memory errors."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import re
from pathlib import Path

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt in <malloc.h>."""

KEPT = 1 << 30
"""Bytes of freed memory that the process keeps; also the size from which a block goes back to the kernel."""

SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

CONTROL_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of version 2 and of version 1, by their names in /proc/self/cgroup: where they are, the files with limit and use, and
the part of the use that is cached files, which the kernel frees first."""

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


def memory_left() -> float:
    """Bytes that this process can still allocate before the kernel kills one: what the machine and its control groups
    (of a container, of a Slurm job) have left; infinite if nothing says so."""
    left = [math.inf]
    with contextlib.suppress(OSError):
        available = re.findall(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        left += [1024 * int(kilobytes) for kilobytes in available]
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, name, path = line.split(":", 2)
            if name in CONTROL_GROUPS:
                root, *files = CONTROL_GROUPS[name]
                own = Path(root, path.lstrip("/"))
                left += [_left_in(group, *files) for group in (own, *own.parents) if group.is_relative_to(root)]
    return min(left)


def _left_in(group: Path, limit: str, used: str, cached: str) -> float:
    """Of one control group; a group without a limit, or that this process does not see, has no such number."""
    with contextlib.suppress(OSError, ValueError):
        files = re.findall(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.M)
        return int((group / limit).read_text()) - int((group / used).read_text()) + sum(map(int, files))
    return math.inf


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host is out of memory; torch has no common type for that."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)

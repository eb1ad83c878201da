"""Whether this process may fork a trainer: a fork copies one thread, and no GPU context."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch


def unforkable() -> str:
    """Why this process must not fork a trainer; "" if it may."""
    if sys.platform != "linux":
        return "only Linux signals a parent's death"
    if not all(os.environ.get(name, "0").isdecimal() for name in ("RANK", "WORLD_SIZE")):
        return "RANK or WORLD_SIZE is no number"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "it uses a GPU already"
    if len(_threads()) > 1:  # OpenBLAS ends its own before a fork, and starts them again when it computes
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
    names = _threads()
    return f"it has {len(names)} threads: {', '.join(names)}" if len(names) > 1 else ""


def _threads() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return sorted(names)

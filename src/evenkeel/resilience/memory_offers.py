"""How a rank reads a state that another process of its machine has in memory (`memory_checkpoint`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple

from .memory_checkpoint import MemoryCheckpoint


class Offer(NamedTuple):
    """A state that a rank has found in memory, for other processes of this machine to read."""

    step: int
    path: str
    identity: tuple[str, int, int]  # the kernel's boot, the file's device and inode: elsewhere the path is another's


def offer(stored: MemoryCheckpoint | None) -> Offer | None:
    """Offer the state that this rank has found (`RankMemory.previous`) to the other ranks of this machine."""
    if not stored:
        return None
    path, identity = f"/proc/{os.getpid()}/fd/{stored.descriptor}", ("", 0, 0)
    with contextlib.suppress(OSError):  # a sandbox may hide /proc; then no other rank finds the file
        identity = _identity(path)
    return Offer(stored.step, path, identity)


def open_first(offers: Iterable[Offer]) -> IO[bytes] | None:
    """Open the first of these that this process can read. It stays readable if the rank that offers it dies."""
    for each in offers:
        with contextlib.suppress(OSError):
            if _identity(each.path) == each.identity:
                return Path(each.path).open("rb")
    return None


def _identity(path: str) -> tuple[str, int, int]:
    status = Path(path).stat()
    return Path("/proc/sys/kernel/random/boot_id").read_text(), status.st_dev, status.st_ino

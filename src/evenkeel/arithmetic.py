"""How numbers are computed, as far as their last bits depend on it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .errors import Ended


def fix_arithmetic(exact: bool, threads: int, tf32: bool = False) -> None:
    """Choose how this process computes. Before it uses a GPU.

    Args:
        exact: only by algorithms that give the same bits each time (https://docs.pytorch.org/docs/stable/notes/randomness.html),
            none chosen by their speed. An operation that has no such algorithm raises an error which names it.
        threads: of one operation on the CPU, which splits its sums among them. 0: as the environment says (torchrun
            sets OMP_NUM_THREADS to 1 where it starts more than one process), or 1 if `exact`.
        tf32: whether float32 products on a GPU may keep 10 bits of their factors' 23. Their bits are the same each time
            on one model of GPU all the same.
    """
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # costs time, and hides nothing here
        torch.backends.cudnn.benchmark = False
    if threads or exact:
        torch.set_num_threads(threads or 1)


@contextmanager
def operations_named() -> Iterator[None]:
    """A context in which an operation that has no deterministic algorithm ends the run in a line.

    Raises:
        Ended: names the operation and the remedy.
    """
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if not found:
            raise
        raise Ended(
            f"{found[1]} has no deterministic algorithm on this device, and --deterministic and --reduce tree need "
            "one; use another operation in its place, or run without them"
        ) from error


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors, in place, by a scalar of any device; they may be on several."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))

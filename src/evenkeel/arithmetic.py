"""How numbers are computed, as far as their last bits depend on it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import BOUNDS
from .errors import Ended
from .processes import count_cores

EXACT_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""In place of what NCCL takes for the fastest on a machine. A switch that adds (NVLS) does so in an order that depends
on what has been allocated before (NVIDIA/nccl issue 2360)."""


def fix_arithmetic(exact: bool, tf32: bool = False) -> None:
    """Choose how this process computes. Before it uses a GPU.

    Args:
        exact: only by algorithms that give the same bits each time (https://docs.pytorch.org/docs/stable/notes/randomness.html),
            none chosen by their speed. An operation that has no such algorithm raises an error which names it. NCCL's
            may be chosen by the user.
        tf32: whether float32 products on a GPU may keep 10 bits of their factors' 23. Their bits are the same each time
            on one model of GPU all the same.
    """
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if torch.cuda.device_count():
            for name, value in EXACT_NCCL.items():
                os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # costs time, and hides nothing here
        torch.backends.cudnn.benchmark = False


def threads_of_a_rank(exact: bool, local_world_size: int) -> int:
    """CPU threads of one operation, which splits its sums among them, where no option says how many.

    One if bits are promised on any number of ranks; else what the user says in OMP_NUM_THREADS; else the cores that
    this process may use, divided among the ranks of the node.
    """
    if exact:
        return 1
    if "OMP_NUM_THREADS" in os.environ and not _set_by_torchrun():
        return min(torch.get_num_threads(), int(BOUNDS["threads"][1]))
    return max(1, count_cores() // local_world_size)


def _set_by_torchrun() -> bool:
    """Whether OMP_NUM_THREADS is torchrun's, which sets it to 1 for several processes, whatever cores there are."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["OMP_NUM_THREADS"] != "1":
        return False
    try:
        of_torchrun = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return b"OMP_NUM_THREADS=" not in of_torchrun


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

"""How numbers are computed, as far as their last bits depend on it."""

from __future__ import annotations

import os
from typing import Any

import torch


def fix_arithmetic(exact: bool, threads: int) -> None:
    """Choose how this process computes. Before it uses a GPU.

    Args:
        exact: only by algorithms that give the same bits each time (https://docs.pytorch.org/docs/stable/notes/randomness.html),
            none chosen by their speed, and with full float32 products. An operation that has no such algorithm raises
            an error which names it.
        threads: of one operation on the CPU, which splits its sums among them. 0: as the environment says (torchrun
            sets OMP_NUM_THREADS to 1 where it starts more than one process), or 1 if `exact`.
    """
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # costs time, and hides nothing here
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if threads or exact:
        torch.set_num_threads(threads or 1)

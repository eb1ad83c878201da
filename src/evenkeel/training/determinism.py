"""Settings that change the last bits of results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import keeper_link
from ..common.errors import Ended
from ..common.processes import count_cores
from ..config import BOUNDS

EXACT_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
"""Instead of the algorithm that NCCL expects to be fastest. A switch that adds (NVLS) does so in an order that depends
on earlier allocations (NVIDIA/nccl issue 2360)."""


def fix_arithmetic(exact: bool, tf32: bool = False) -> str:
    """Choose how this process computes, before it uses a GPU.

    Args:
        exact: use only algorithms that give the same bits each time, none chosen for its speed
            (https://docs.pytorch.org/docs/stable/notes/randomness.html). NCCL's variables may be set by the user.
        tf32: whether float32 products on a GPU may use only 10 of the factors' 23 mantissa bits; this is repeatable.

    Returns:
        A message if the program had allowed coarser products, and `tf32` does not; else empty.
    """
    backends: Any = torch.backends
    before, chosen = matmul_precision(), "high" if tf32 else "highest"
    for part in _parts_with_precision():  # it overrides what is set below
        part.fp32_precision = "none"
    torch.set_float32_matmul_precision(chosen)
    backends.cudnn.allow_tf32 = tf32
    if exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if torch.cuda.device_count():
            for name, value in EXACT_NCCL.items():
                os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # costs time, and no uninitialized memory is read here
        backends.cudnn.benchmark = False
    if tf32 or before == "highest":
        return ""
    return f"the program's precision of float32 products, {before}, is reset to full; --precision tf32 allows TF32"


def matmul_precision() -> str:
    """The precision of float32 products: highest, high or medium, or torch's newer names for it on GPUs and CPUs."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has used the newer setting, and torch refuses to translate it
        backends: Any = torch.backends
        return f"{backends.cuda.matmul.fp32_precision}, CPU {backends.mkldnn.matmul.fp32_precision}"


@contextmanager
def float32_restored() -> Iterator[None]:
    """Leave this process the precision of float32 that it had, by torch's older settings and the newer ones."""
    cudnn: Any = torch.backends.cudnn
    matmul = tf32 = None
    with suppress(RuntimeError):  # as in `matmul_precision`
        matmul = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        tf32 = cudnn.allow_tf32
    newer = [(part, part.fp32_precision) for part in _parts_with_precision()]
    try:
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if tf32 is not None:
            cudnn.allow_tf32 = tf32
        for part, value in newer:
            part.fp32_precision = value


def _parts_with_precision() -> list[Any]:
    """What has torch's newer setting, `fp32_precision`: the whole, then its parts; nothing before torch 2.9."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return []
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    parts = [backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    return [backends, cudnn, mkldnn, *parts]


def threads_of_a_rank(exact: bool, local_world_size: int) -> int:
    """CPU threads among which an operation splits its sums: one if bits must not depend on the number of ranks;
    else the user's OMP_NUM_THREADS; else this rank's share of the cores that the process may use."""
    if exact:
        return 1
    if "OMP_NUM_THREADS" in os.environ and not _set_by_torchrun():
        return min(torch.get_num_threads(), int(BOUNDS["threads"][1]))
    return max(1, count_cores() // local_world_size)


def _set_by_torchrun() -> bool:
    """Whether OMP_NUM_THREADS was set by torchrun, which sets 1 for several processes whatever the number of cores."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["OMP_NUM_THREADS"] != "1":
        return False
    try:
        return b"OMP_NUM_THREADS=" not in Path(f"/proc/{keeper_link.starter()}/environ").read_bytes()
    except OSError:
        return True


@contextmanager
def operations_named() -> Iterator[None]:
    """Explain the error of an operation without a deterministic algorithm."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if not found:
            raise
        raise Ended(
            f"{found[1]} has no deterministic algorithm on this device, and --deterministic and --reduce tree need "
            "one; use another operation, or run without these options"
        ) from error


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a scalar; each of them may be on another device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))

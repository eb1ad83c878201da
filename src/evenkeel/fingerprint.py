"""What the bits of a run depend on besides its options: the machine, the libraries, the code.

A resume compares this with what the checkpoint was made with, and the ranks compare theirs with each other. The number
of ranks is no part of it, nor is anything else that may change while a run goes on; nor is the data, which
would have to be read.

torch is imported where it is used, so that two runs can be compared without it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .tasks import Task

Fingerprint = Mapping[str, str]
Differences = dict[str, tuple[str, str]]
"""Part -> (old, new)."""

UNSET = "(none)"

ENVIRONMENT = (
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
)
"""Variables by which libraries choose other kernels or another order of adding, and which no call of torch tells."""

NOT_COMPUTING = frozenset(
    [
        "__init__",
        "__main__",
        "activity",
        "background",
        "checked_metrics",
        "checked_optimizers",
        "checkpoint",
        "cli",
        "comparison",
        "compiled_code",
        "config",
        "cut",
        "data_digest",
        "deadline",
        "devices",
        "digest",
        "display",
        "downloads",
        "errors",
        "eval_only",
        "files",
        "fingerprint",
        "hang",
        "heartbeat",
        "inspection",
        "interruption",
        "launch",
        "launchers",
        "ledger",
        "memory",
        "mistakes",
        "naming",
        "network",
        "planning",
        "placement",
        "probe",
        "processes",
        "records",
        "rendezvous",
        "run",
        "run_directory",
        "seqlock",
        "single_samples",
        "staging",
        "synonyms",
        "tracking",
        "weights",
        "world",
    ]
)
"""Modules of Evenkeel that carry numbers about, or tell of them, and make none. All others count."""


def fingerprint(task: Task, device: torch.device) -> dict[str, str]:
    """All that the bits of a run depend on here, besides the options in its config.toml.

    - torch, torch_build, numpy, torchvision and pillow (if the task uses them): kernels and decoders change between
      releases, and the same release is built with other libraries. python: its `random` may shuffle differently.
    - architecture, cpu_capability: the vector width decides how many partial sums a reduction has. onednn, mkl:
      whose matrix products and convolutions those are.
    - device, device_model: libraries choose kernels and block sizes by the model, on a CPU by its caches as well. For
      GPUs also the releases of cuda, cudnn and nccl.
    - threads: among which a long sum is divided, on a CPU.
    - deterministic: without it, some GPU kernels add in the order in which their blocks happen to end. matmul, tf32:
      how many bits a product keeps. cudnn_benchmark: kernels are then chosen by their speed on the day. default_dtype.
    - environment variables of the libraries (:data:`ENVIRONMENT`) that are set.
    - code:FILE: 16 digits of the sha256 of the main program, of the task's file and the modules of its folder or
      package that are loaded, and of those of Evenkeel that compute. The text counts, comments included: whether an
      edit computes something else, no digest can tell.

    Args:
        task: whose code counts.
        device: where the model is.

    Returns:
        Plain strings by part. What does not apply here is left out.
    """
    import numpy as np
    import torch

    build = [line for line in torch.__config__.show().splitlines() if "CPU capability usage" not in line]
    parts = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),  # which is no plain string
        "torch_build": _digest("\n".join(build).encode()),
        "numpy": np.__version__,
        "architecture": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": str(torch.backends.mkldnn.enabled),
        "mkl": str(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
        "device": device.type,
        "device_model": _gpu_model(device) if device.type == "cuda" else _cpu_model(),
    }
    if torchvision := sys.modules.get("torchvision"):
        parts["torchvision"] = torchvision.__version__
    if pillow := sys.modules.get("PIL"):
        parts["pillow"] = pillow.__version__
    if device.type == "cuda":
        parts |= _gpu_libraries()
    parts |= {f"env:{name}": os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return parts | {f"code:{name}": _digest(path.read_bytes()) for name, path in sorted(_sources(task))}


def differences(old: Fingerprint, new: Fingerprint) -> Differences:
    """The parts that differ, in the new one's order; a checkpoint that is too old to have any is one difference."""
    if not old:
        return {"fingerprint": (UNSET, "kept")}
    names = [*new, *(name for name in old if name not in new)]
    return {n: (old.get(n, UNSET), new.get(n, UNSET)) for n in names if old.get(n) != new.get(n)}


def differences_among_ranks(fingerprints: Sequence[Fingerprint]) -> Differences:
    """In what other ranks differ from rank 0; each part says which ranks those are.

    Args:
        fingerprints: of all ranks, in their order.
    """
    from .hang import name_ranks

    groups: dict[tuple[str, tuple[str, str]], list[int]] = {}
    for rank, theirs in enumerate(fingerprints):
        for part in differences(fingerprints[0], theirs).items():
            groups.setdefault(part, []).append(rank)
    return {f"{name} of {name_ranks(ranks)}": values for (name, values), ranks in groups.items()}


def describe(found: Differences, most: int = 8) -> str:
    """Differences in a line: "threads 1 -> 2, numpy 2.1 -> 2.2"; of many only the first ones."""
    shown = [f"{name} {old} -> {new}" for name, (old, new) in found.items()]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _cpu_model() -> str:
    """Vendor, family, model and name, as Linux tells them; a virtual machine's name alone says little."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    return " ".join(known[name] for name in names if name in known) or platform.processor()


def _gpu_model(device: torch.device) -> str:
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.multi_processor_count} multiprocessors, capability {found.major}.{found.minor}"


def _gpu_libraries() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    cudnn: Any = torch.backends.cudnn  # without types
    nccl: Any = torch.cuda.nccl
    return {
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(cudnn.version()),
        "nccl": str(nccl.version()) if dist.is_nccl_available() else UNSET,
        "tf32_matmul": _tf32(torch.backends.cuda.matmul),
        "tf32_cudnn": _tf32(getattr(cudnn, "conv", cudnn)),
        "cudnn_benchmark": str(cudnn.benchmark),
        "cudnn_deterministic": str(cudnn.deterministic),
    }


def _tf32(backend: Any) -> str:
    """Releases that know `fp32_precision` raise where a program has used it and then asks for `allow_tf32`."""
    return str(backend.fp32_precision if hasattr(backend, "fp32_precision") else backend.allow_tf32)


def _sources(task: Task) -> Iterator[tuple[str, Path]]:
    """(name, file) of the code that computes."""
    ours = Path(__file__).parent
    yield from ((f"evenkeel/{path.name}", path) for path in ours.glob("*.py") if path.stem not in NOT_COMPUTING)
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main:
        yield Path(main).name, Path(main)
    own = sys.modules[type(task).__module__]
    package = sys.modules[own.__name__.partition(".")[0]]  # of a file: that file itself
    folder = Path((package.__file__ if package.__name__ != __package__ else None) or own.__file__ or "").parent
    if folder == ours:
        return
    inside = f"{folder}{os.sep}"
    others = [ours, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    outside = tuple(path for path in (f"{other}{os.sep}" for other in others) if not inside.startswith(path))
    for module in list(sys.modules.values()):
        file = str(getattr(module, "__file__", None) or "")
        if file.startswith(inside) and not file.startswith(outside) and Path(file).is_file():
            yield str(Path(file).relative_to(folder)), Path(file)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

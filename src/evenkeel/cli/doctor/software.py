"""Versions, and whether they fit together."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata

import torch

from ...common.versions import TORCH_FOR_SHARDING, numbers
from .findings import Finding, judged

PYTHON, TORCH = (3, 10), (2, 8)
"""The oldest that pyproject.toml allows."""

REINSTALL = "pip install --constraint requirements.lock --editable ."


def versions(sharded: bool = False) -> Iterator[Finding]:
    """Python, torch (2.9 for --shard on), and torchvision, which is compiled for one version of torch."""
    least = TORCH_FOR_SHARDING if sharded else TORCH
    old = sys.version_info[:2] < PYTHON
    yield judged("Python", sys.version.split()[0], "3.10 or newer", "make setup PYTHON=python3.12", fail=old, same=True)
    build = f"{torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'})"
    wanted = ".".join(map(str, least)) + " or newer" + (" for --shard on" if sharded else "")
    yield judged("torch", build, wanted, REINSTALL, fail=numbers(torch.__version__) < least, same=True)
    yield from torchvision()


def torchvision() -> Iterator[Finding]:
    """Whether it names the torch that is here, and whether its compiled operators load."""
    try:
        known = metadata.distribution("torchvision")
    except metadata.PackageNotFoundError:
        yield Finding("FAIL", "torchvision", "not installed", "the one for this torch", REINSTALL)
        return
    needs = [re.match(r"torch\s*\(?([=>])=\s*([\w.]+)", line) for line in known.requires or []]
    relation, wanted = next(((it[1], it[2]) for it in needs if it), ("", ""))
    here, least = numbers(torch.__version__), numbers(wanted)
    yield judged(
        "torchvision",
        known.version + (f", for torch {relation}= {wanted}" if wanted else ""),
        f"the torchvision for torch {torch.__version__}",
        REINSTALL,
        fail=here < least if relation == ">" else here[: len(least)] != least,
        same=True,
    )
    try:
        importlib.import_module("torchvision.ops")
    except Exception as error:
        yield Finding("FAIL", "torchvision import", f"{type(error).__name__}: {error}", "it imports", REINSTALL)


def cuda(driver: str, driver_cuda: str) -> Iterator[Finding]:
    """CUDA of torch against that of the driver, and NCCL.

    Args:
        driver: the driver's version; empty without GPUs.
        driver_cuda: the newest CUDA that it knows, as nvidia-smi says; empty if that is not known.
    """
    built = torch.version.cuda or ""
    if not driver:
        return
    too_old = built and driver_cuda and numbers(driver_cuda)[0] < numbers(built)[0]
    expected = f"a driver for CUDA {built}: torch is built with it" if built else "a torch with CUDA"
    yield judged(
        "driver",
        f"{driver}, for CUDA {driver_cuda or '?'}",
        expected,
        "nvidia-smi    # update the driver, or install a torch for this CUDA: https://pytorch.org/get-started",
        fail=too_old or not built,
        same=True,
    )
    usable = torch.cuda.is_available()
    yield judged(
        "CUDA in torch", "works" if usable else "torch cannot use the GPUs", "it works", REINSTALL, fail=not usable
    )
    if usable and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        yield judged("NCCL", nccl, same=True)
    elif usable:
        yield Finding("FAIL", "NCCL", "not in this torch", "a torch with NCCL", REINSTALL)

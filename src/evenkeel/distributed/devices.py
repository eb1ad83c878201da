"""GPUs by torch's number in this process and by the machine's.

Under CUDA_VISIBLE_DEVICES=2,3 torch's cuda:0 is the machine's GPU 2, so messages name both. (The machine's numbers
follow CUDA_DEVICE_ORDER; nvidia-smi's are those of PCI_BUS_ID.)
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..common.arguments import GPUS_HIDDEN
from ..common.errors import Refusal
from ..common.naming import name_ranks

GPU_DEVICES = Path("/dev/nvidiactl")
"""Exists if NVIDIA's driver is loaded."""

GIB = 1 << 30

_chosen: list[torch.device] = []


def choose(devices: Sequence[torch.device]) -> None:
    """Note which devices this process computes on, the first one first."""
    _chosen[:] = devices


def own_device() -> torch.device:
    """The first of this process's devices; the CPU until they are chosen."""
    return _chosen[0] if _chosen else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Name a device in both ways: "cuda:0 (GPU 2)", "cuda:0 (MIG-...)"; "cpu"."""
    if device.type != "cuda":
        return str(device)
    index, names = device.index or 0, _visible()
    entry = names[index] if index < len(names) else str(index)
    return f"cuda:{index} ({f'GPU {entry}' if entry.isdigit() else entry})"


def explain_devices(local_world_size: int, gpus: int, each: int = 1) -> str:
    """Say why a node's processes, with `each` GPUs a process, do not fit on its GPUs, and which they would get."""

    def gpus_of(rank: int) -> str:
        numbers = range(rank * each, rank * each + each)
        return " and ".join(device_name(torch.device("cuda", n)) if n < gpus else "none" for n in numbers)

    got = ", ".join(f"local rank {rank} -> {gpus_of(rank)}" for rank in range(local_world_size))
    names = _visible()
    if len(names) > gpus:
        got += f"; the entry {names[gpus]} is not a GPU of this machine, so CUDA ignores it and all after it"
    needs = f" with {each} GPUs each (--place or --model-parallel)" if each > 1 else ""
    most = f"start at most {gpus // each}" if gpus >= each else "use fewer per process"
    return (
        f"{local_world_size} process{'es' if local_world_size != 1 else ''} on this node{needs} but {gpus} visible "
        f"GPU{'s' * (gpus != 1)} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): "
        f"{got}; {most} (--nproc_per_node or -g), or let processes share GPUs with train.py's --share-gpu, which is "
        "slow, or hide all with CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def refuse_missing(gpus: int, control: Path = GPU_DEVICES) -> None:
    """Refuse a CUDA_VISIBLE_DEVICES that names only GPUs which do not exist: torch would silently use the CPU.

    Args:
        gpus: that torch sees.
        control: exists if this machine has GPUs. If it has none, the variable does not matter.
    """
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not gpus and asked.strip() not in GPUS_HIDDEN and control.exists():
        raise Refusal(
            f"CUDA_VISIBLE_DEVICES={asked}: has no GPU that torch can use here{_of_the_machine()}; name others, or "
            "set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def node_name() -> str:
    """The name by which Slurm knows this node; outside Slurm the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Device(NamedTuple):
    """What a rank computes on."""

    host: str
    line: str
    """For messages."""
    kind: str
    """Should be the same for all ranks."""


def describe(device: torch.device) -> Device:
    """Describe a device of this process."""
    host = socket.gethostname()
    line = f"{device_name(device)} of {host}"
    if device.type != "cuda":
        return Device(host, line, "a CPU")
    found = torch.cuda.get_device_properties(device)
    gib = found.total_memory / GIB  # the kind's are whole, because a driver keeps a few MiB more on one card
    return Device(host, f"{line}, {found.name}, {gib:.1f} GiB", f"{found.name} with {gib:.0f} GiB")


def explain_uneven(kinds: Sequence[str]) -> str:
    """Return a line if the devices of all ranks, in order, are not of one kind; empty if they are."""
    groups = {kind: [rank for rank, its in enumerate(kinds) if its == kind] for kind in dict.fromkeys(kinds)}
    if len(groups) < 2:
        return ""
    shown = "; ".join(f"{name_ranks(ranks)}: {kind}" for kind, ranks in groups.items())
    return (
        f"the devices of this job differ ({shown}): the smallest memory limits --micro-batch, and all ranks wait for "
        "the slowest"
    )


def explain_unused() -> str:
    """Return a line if this machine has an accelerator that torch can use and Evenkeel cannot, such as Apple's MPS."""
    found = torch.accelerator.current_accelerator(check_available=True) if own_device().type == "cpu" else None
    if found is None or found.type == "cuda":
        return ""
    return f"the {found.type} device of {socket.gethostname()} is not used: only CUDA is supported; training on the CPU"


def _visible() -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES; none if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [entry.strip() for entry in value.split(",")] if value else []


def _of_the_machine() -> str:
    """The GPUs that nvidia-smi lists; empty if it does not work."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return ""
    gpus = [line.strip() for line in listed.splitlines() if line.strip()]
    return f" (this machine has: {'; '.join(gpus)})"

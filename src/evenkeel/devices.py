"""GPUs by both their names: torch's number within this process, and what the machine calls them.

Under CUDA_VISIBLE_DEVICES=2,3 torch's cuda:0 is the machine's GPU 2. A message that says only one of them sends people
to the wrong card. (The machine's numbers are in the order of CUDA_DEVICE_ORDER; nvidia-smi's is PCI_BUS_ID.)
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import Refusal

GPU_DEVICES = Path("/dev/nvidiactl")
"""Is there where NVIDIA's driver is."""

GIB = 1 << 30

HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose."""


_chosen: list[torch.device] = []


def choose(devices: Sequence[torch.device]) -> None:
    """Note which devices this process computes on, the first one first."""
    _chosen[:] = devices


def own_device() -> torch.device:
    """The first of this process's devices; the CPU until they are known, because nothing is on another one then."""
    return _chosen[0] if _chosen else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """A device by both its names: "cuda:0 (GPU 2)", "cuda:0 (MIG-...)"; "cpu" is itself."""
    if device.type != "cuda":
        return str(device)
    index = device.index or 0
    names = _visible() or []
    entry = names[index] if index < len(names) else str(index)
    return f"cuda:{index} ({f'GPU {entry}' if entry.isdigit() else entry})"


def name_visible(gpus: int) -> str:
    """All GPUs that this process sees, by both names; "none" where there are none."""
    return ", ".join(device_name(torch.device("cuda", i)) for i in range(gpus)) or "none"


def explain_devices(local_world_size: int, gpus: int, each: int = 1) -> str:
    """Why so many processes do not fit on so many visible GPUs, and which GPUs each would get.

    Args:
        local_world_size: processes.
        gpus: visible ones.
        each: GPUs that each process needs.
    """

    def share(rank: int) -> str:
        numbers = range(rank * each, rank * each + each)
        return " and ".join(device_name(torch.device("cuda", n)) if n < gpus else "none" for n in numbers)

    got = ", ".join(f"local rank {rank} -> {share(rank)}" for rank in range(local_world_size))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    needs = f" with {each} GPUs each (--place or --model-parallel)" if each > 1 else ""
    most = f"start at most {gpus // each}" if gpus >= each else "use fewer for each process"
    return (
        f"{local_world_size} process{'es' * (local_world_size != 1)} on this node{needs} but {gpus} visible "
        f"GPU{'s' * (gpus != 1)} (CUDA_VISIBLE_DEVICES={'unset' if visible is None else visible}): "
        f"{got}{_missing(gpus)}; {most} (--nproc_per_node or -g), or hide all with CUDA_VISIBLE_DEVICES= to train on "
        "the CPU"
    )


def refuse_missing(gpus: int, control: Path = GPU_DEVICES) -> None:
    """Refuse a CUDA_VISIBLE_DEVICES that names only GPUs which are not there: the CPU would do the work in silence.

    Args:
        gpus: that torch sees.
        control: is there if this machine has GPUs. Without any, the variable is a habit and no mistake.
    """
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not gpus and asked.strip() not in HIDDEN and control.exists():
        raise Refusal(
            f"CUDA_VISIBLE_DEVICES={asked}: names no GPU that torch can use here{_of_the_machine()}; name others, or "
            "set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def refuse_company(processes: int, gpus: int) -> None:
    """Refuse --strategy dp with more than one process: each would take all the GPUs.

    Args:
        processes: of the job.
        gpus: that torch sees here.
    """
    if processes > 1:
        raise Refusal(
            f"--strategy dp: is one process with all visible GPUs (here: {name_visible(gpus)}), and this job has "
            f"{processes} processes; start one (python train.py, -g 1), with CUDA_VISIBLE_DEVICES for a choice, or use "
            "the default --strategy ddp"
        )


def replicas(strategy: str, device: torch.device) -> list[torch.device]:
    """The devices among which one process divides its micro-batches: with --strategy dp all GPUs, else its own."""
    if strategy != "dp" or device.type != "cuda":
        return [device]
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


@dataclass(frozen=True)
class Device:
    """What a rank computes on."""

    host: str
    name: str
    """By both its names."""
    model: str
    """Empty for a CPU."""
    memory: int
    """Bytes; 0 for a CPU."""

    def __str__(self) -> str:
        return f"{self.name} of {self.host}" + (f", {self.model}, {self.memory / GIB:.1f} GiB" if self.model else "")


def describe(device: torch.device) -> Device:
    """A device of this process."""
    host, name = socket.gethostname(), device_name(device)
    if device.type != "cuda":
        return Device(host, name, "", 0)
    found = torch.cuda.get_device_properties(device)
    return Device(host, name, found.name, found.total_memory)


def explain_uneven(devices: Sequence[Device]) -> str:
    """A line if the GPUs of a job are not all of one kind; empty if they are.

    Args:
        devices: of all ranks, in their order. Memory counts in GiB: a driver keeps a few MiB more on one card.
    """
    from .hang import name_ranks

    groups: dict[tuple[str, int], list[int]] = {}
    for rank, device in enumerate(devices):
        groups.setdefault((device.model or "a CPU", round(device.memory / GIB)), []).append(rank)
    if len(groups) < 2:
        return ""
    largest_first = sorted(groups.items(), key=lambda group: -group[0][1])
    kinds = [
        f"{name_ranks(ranks)}: {model}" + (f" with {gib} GiB" if gib else "") for (model, gib), ranks in largest_first
    ]
    return (
        f"the devices of this job differ ({'; '.join(kinds)}): the smallest memory bounds --micro-batch, and all wait "
        "for the slowest"
    )


def _visible() -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [entry.strip() for entry in value.split(",")] if value else None


def _missing(gpus: int) -> str:
    """The first entry of CUDA_VISIBLE_DEVICES that is none: CUDA ignores it, and all that follow."""
    names = _visible() or []
    if len(names) <= gpus:
        return ""
    return f"; the entry {names[gpus]} is no GPU of this machine, and CUDA ignores it and all after it"


def _of_the_machine() -> str:
    """What nvidia-smi says there is; empty where it says nothing."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S607
    except (OSError, subprocess.SubprocessError):
        return ""
    gpus = [line.strip() for line in listed.splitlines() if line.strip()]
    return f" (there are: {'; '.join(gpus)})"

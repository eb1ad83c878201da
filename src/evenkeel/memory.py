"""Memory that runs out: one message that says whose it was and what helps."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from .activity import CHECKPOINT, EVALUATION, activity
from .config import Config
from .data import tensors_in
from .devices import GIB, describe, own_device
from .errors import EndedHere
from .mistakes import is_out_of_memory
from .plan import next_smaller

T = TypeVar("T")

MANY = 6
"""Tensors of a batch that a line bears."""


class OutOfMemory(EndedHere):
    """Memory has run out on this rank."""


def note_batch(error: BaseException, batch: Any) -> None:
    """Let an out-of-memory error know of its batch and phase. Called where they are at hand, on the way out."""
    if is_out_of_memory(error):
        activity.note(error)
        with contextlib.suppress(AttributeError):
            error.shapes = shapes(batch)  # type: ignore[attr-defined]


def shapes(batch: Any) -> str:
    """All tensors of a batch: "[8, 1, 28, 28] float32, [8] int64"."""
    known = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors_in(batch)]
    return ", ".join(known[:MANY]) + (f" and {len(known) - MANY} more" if len(known) > MANY else "")


def explained(error: BaseException, device: torch.device, config: Config | None = None, saved: str = "") -> str:
    """The whole story of an out-of-memory error, in a line.

    Args:
        error: from anywhere in this process.
        device: this rank's.
        config: with the micro-batch; None where it is not known yet.
        saved: what has become of the last finished step.
    """
    # of nn.DataParallel, or with a model on several devices
    if other := re.search(r"in replica \d+ on device (\d+)|GPU (\d+) has a total capacity", str(error)):
        device = torch.device("cuda", int(other[1] or other[2]))
    wanted = re.search(r"ried to allocate (\d[\d.]* \w+)", str(error))
    on_host = device.type != "cuda" or "DefaultCPUAllocator" in str(error) or isinstance(error, (MemoryError, OSError))
    place = f"the memory of host {socket.gethostname()}" if on_host else str(describe(device))
    batch = getattr(error, "shapes", "")
    parts = [
        f"out of memory on rank {os.environ.get('RANK', '0')} ({place})",
        _when(activity.phase_of(error)),
        f"{wanted[1]} more were wanted" if wanted else "",
        f"the batch was {batch}" if batch else "",
        _held_on_host() if on_host else _held_on_gpu(device),
        remedy(config) if config else "make room, or take a smaller --micro-batch",
        saved,
    ]
    return "; ".join(filter(None, parts))


def _when(phase: str) -> str:
    """Which of the steps a phase belongs to: a step is done before its checkpoint and its evaluation."""
    if phase in (EVALUATION, CHECKPOINT):
        return f"it was in {phase} after step {activity.step}"
    return f"it was in {phase} of step {activity.step + 1}"


def remedy(config: Config) -> str:
    """The option to type, which lets the same run go on."""
    known = config.largest_micro_batch
    if known == "auto":
        return "make room, or take a smaller model"
    if known == 1:
        return "--micro-batch is 1 already: make room, or take a smaller model"
    smaller = next_smaller(known, config.batch_size)
    return (
        f"the same command with --micro-batch {smaller} instead of {known} goes on with the same batches, in "
        "smaller pieces (--micro-batch auto finds what fits when a run starts)"
    )


def explaining(main: Callable[[], T]) -> Callable[[], T]:
    """A main program in which memory may run out anywhere, the device's for the model itself as well."""

    @functools.wraps(main)
    def call() -> T:
        try:
            return main()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(explained(error, own_device())) from error

    return call


def _held_on_gpu(device: torch.device) -> str:
    """Who holds a GPU's memory.

    What is neither free nor torch's in this process belongs to others, and a few hundred MiB of it to this process's
    own CUDA context and NCCL.
    """
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # a context that has not even come to be
        return f"nothing is known of its memory{_others(device)}"
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    spare = reserved - used
    text = (
        f"of {_gib(total)} this process holds {_gib(reserved)} ({_gib(used)} in tensors, {_gib(spare)} kept for more)"
    )
    text += f", others and its context {_gib(max(0, total - free - reserved))}{_others(device)}, {_gib(free)} are free"
    if spare > total / 10:
        text += "; much is kept in pieces too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
    return text


def _others(device: torch.device) -> str:
    """The other processes on a GPU with what they hold, as the driver tells; in a container it tells of few or none."""
    asked = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,name", "--format=csv,noheader"]
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        told = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError):
        return ""
    return name_processes(told, uuid, os.getpid())


def name_processes(told: str, uuid: str, own: int) -> str:
    """nvidia-smi's list of processes, of one GPU and without this process: " (process 71 python3: 2048 MiB)".

    Args:
        told: lines of GPU's UUID, process id, memory and name.
        uuid: with or without the prefix GPU-.
        own: this process's id.
    """
    rows = [[cell.strip() for cell in line.split(",", 3)] for line in told.splitlines()]
    there = [row for row in rows if len(row) == 4 and row[0].removeprefix("GPU-") == uuid.removeprefix("GPU-")]
    shown = [f"process {pid} {Path(name).name}: {memory}" for _, pid, memory, name in there if pid != str(own)]
    return f" ({', '.join(shown)})" if shown else ""


def _held_on_host() -> str:
    """What this process holds of the host's memory, and what bounds it."""
    text = f"this process holds {_gib(_kib('/proc/self/status', 'VmRSS'))}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        size = _kib("/proc/self/status", "VmSize")
        text += f", and of its limit of {_gib(limit)} of addresses (ulimit -v) {_gib(size)} are taken"
    available = _kib("/proc/meminfo", "MemAvailable")
    return text + (f"; {_gib(available)} of the host's are available" if available else "")


def _kib(file: str, name: str) -> int:
    """A line "NAME:   123 kB" in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"

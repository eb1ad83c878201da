"""Out of memory: one message that says what uses the memory and what helps."""

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

from ..common.errors import EndedHere, place_of
from ..common.memory import is_out_of_memory
from ..common.phases import CHECKPOINT, COMPUTING, EVALUATION, REDUCTION, activity
from ..common.versions import TORCH_FOR_SHARDING, numbers
from ..config import Config, unshardable
from ..data.batch import tensors_in
from ..data.plan import MicroBatch
from ..distributed.devices import GIB, describe, own_device

T = TypeVar("T")


class OutOfMemory(EndedHere):
    """Memory has run out on this rank."""


def explaining(main: Callable[[], T]) -> Callable[[], T]:
    """Decorate a main program so that any out-of-memory error in it explains the cause."""

    @functools.wraps(main)
    def call() -> T:
        try:
            return main()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(explained(error, own_device())) from error

    return call


def note_batch(error: BaseException, batch: Any, remedy: str = "", micro_batch: MicroBatch | None = None) -> None:
    """Attach the phase, the shapes of the batch and a specific remedy to an out-of-memory error that is being raised;
    an error that already has a remedy is not changed. To another error of a pass, attach the batch and, in a forward
    pass, its micro-batch."""
    if activity.phase in (COMPUTING, REDUCTION, EVALUATION):  # not while the next batch is loaded
        with contextlib.suppress(Exception):  # its attributes may be read-only
            where = micro_batch if activity.phase == COMPUTING else None
            error.micro_batch = batch, where  # type: ignore[attr-defined]
    if is_out_of_memory(error) and not getattr(error, "remedy", ""):
        activity.attach_phase(error)
        error.remedy = remedy  # type: ignore[attr-defined]
        tensors = [part for it in tensors_in(batch) for part in (it.unbind() if it.is_nested else [it])]
        known = [f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors]
        more = f" and {len(known) - 6} more" if len(known) > 6 else ""
        error.shapes = ", ".join(known[:6]) + more  # type: ignore[attr-defined]


def explained(error: BaseException, device: torch.device, config: Config | None = None) -> str:
    """An out-of-memory error in a line."""
    # with nn.DataParallel or a model on several devices, the error may name another GPU
    if other := re.search(r"in replica \d+ on device (\d+)|GPU (\d+) has a total capacity", str(error)):
        device = torch.device("cuda", int(other[1] or other[2]))
    wanted = re.search(r"ried to allocate (\d[\d.]*) (\w+)", str(error))
    size = "" if not wanted else _gib(float(wanted[1])) if wanted[2] == "bytes" else " ".join(wanted.groups())
    on_host = device.type != "cuda" or "DefaultCPUAllocator" in str(error) or isinstance(error, (MemoryError, OSError))
    place = f"the memory of host {socket.gethostname()}" if on_host else describe(device).line
    phase = activity.phase_of(error)
    done = phase in (EVALUATION, CHECKPOINT)  # these come after their step
    batch = getattr(error, "shapes", "")
    parts = [
        f"out of memory on rank {os.environ.get('RANK', '0')} ({place})",
        f"it was in {phase} " + (f"after step {activity.step}" if done else f"of step {activity.step + 1}"),
        ((f"{size} more were requested" if size else "") + place_of(error.__traceback__)).strip(),
        f"the batch was {batch}" if batch else "",
        _held_on_host() if on_host else _held_on_gpu(device),
        getattr(error, "remedy", "") or (remedy(config) if config else "make room, or use a smaller --micro-batch"),
    ]
    return "; ".join(filter(None, parts))


def remedy(config: Config) -> str:
    """The option that continues the same run."""
    known = config.largest_micro_batch
    again = (
        "" if config.checkpoint_activations or config.compile else "try --checkpoint-activations (slower, same bits)"
    )
    divide = ""
    ranks, old = int(os.environ.get("WORLD_SIZE", "1")), numbers(torch.__version__) < TORCH_FOR_SHARDING
    if ranks > 1 and config.shard not in ("on", ranks) and not (old or unshardable(config)):
        divide = "--shard on" if config.reduce == "tree" else "in a new run --reduce tree --shard on"
    if known in ("auto", 1):
        return ", or ".join(
            filter(None, [f"--micro-batch is {known} already: {again or 'make room'}", divide, "use a smaller model"])
        )
    return (
        f"the same command with --micro-batch {next_smaller(int(known), config.batch_size)} instead of {known} goes on "
        "with the same batches, in smaller pieces (--micro-batch auto finds the largest that fits when a run starts)"
        + "".join(f"; or {each}" for each in (again, divide) if each)
    )


def next_smaller(micro_batch: int, batch: int) -> int:
    """The next micro-batch to try when one does not fit: a half, or a little less if that divides the batch.

    A divisor leaves no remainder, which might be a single sample, on which BatchNorm cannot train.
    """
    half = max(1, micro_batch // 2)
    return next((size for size in range(half, half // 2, -1) if batch % size == 0), half)


def _held_on_gpu(device: torch.device) -> str:
    """The use of a GPU's memory. A few hundred MiB outside torch are this process's own CUDA context and NCCL."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # CUDA could not even start
        return f"its memory use is unknown{_others(device)}"
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    text = (
        f"of {_gib(total)} this process has {_gib(reserved)} ({_gib(used)} in tensors, {_gib(reserved - used)} cached "
        f"by torch), others and its context {_gib(max(0, total - free - reserved))}{_others(device)}, {_gib(free)} are "
        "free"
    )
    if reserved - used > total / 10:
        text += "; much of the cache is fragmented: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
    return text


def _others(device: torch.device) -> str:
    """The other processes on a GPU, " (process 71 python3: 2048 MiB)"; in a container the driver names few or none."""
    asked = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,name", "--format=csv,noheader"]
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        told = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError):
        return ""
    rows = [row for row in (line.split(", ", 3) for line in told.splitlines()) if len(row) == 4]
    others = [row for row in rows if row[0].removeprefix("GPU-") == uuid and row[1] != str(os.getpid())]
    shown = ", ".join(f"process {pid} {Path(name).name}: {memory}" for _, pid, memory, name in others)
    return f" ({shown})" if shown else ""


def _held_on_host() -> str:
    """This process's use of the host's memory, and its limit."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:  # not on Linux
        return ""
    size, resident = (_gib(int(number) * resource.getpagesize()) for number in pages[:2])
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = f", and {size} of address space, of its limit of {_gib(limit)} (ulimit -v)"
    return f"this process uses {resident}" + limited * (limit != resource.RLIM_INFINITY)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"

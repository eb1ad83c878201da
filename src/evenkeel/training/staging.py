"""Host memory for copies of the state, allocated once and reused.

Fresh memory costs more than the copy into it, because the kernel has to find and clear every page. So a checkpoint is
copied into the memory of the previous one, and written from there while the training goes on.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..common.deadlines import FOREVER, left

log = logging.getLogger(__name__)

Keys = tuple[object, ...]
"""The keys and indices that lead to a tensor in a tree."""

ALIGNED = 64
"""Bytes; each tensor begins at a multiple of it, as in torch's own memory on the CPU."""


class Staging:
    """Memory for one copy. Reserve it, copy, read the copy, release it; a second thread may do the last two.

    Args:
        devices: where the tensors are. Those on a GPU are copied on a separate stream, because the compute stream
            may be stuck in a collective.
        still: the state no longer changes, so host tensors are not copied. Otherwise the last save of a run would
            be its peak of memory.
    """

    def __init__(self, *devices: torch.device, still: bool = False) -> None:
        self._still = still
        self._reserved = threading.Lock()
        self._buffers: dict[Keys, Tensor] = {}
        self.pinned = False
        """Whether :meth:`pin` has been called."""
        gpus = [device for device in devices if device.type == "cuda"]
        self._streams = [torch.cuda.Stream(device) for device in gpus]  # type: ignore[no-untyped-call]

    def reserve(self, until: float = FOREVER) -> bool:
        """Reserve the memory until :meth:`release`; False if another user still has it at the moment ``until``."""
        return self._reserved.acquire(timeout=left(until))

    def release(self) -> None:
        """Let the memory be overwritten. Any thread may call this."""
        self._reserved.release()

    def pin(self, tree: Any) -> None:
        """Allocate page-locked memory for the tensors on a GPU, which are then copied at full speed.

        Do not call this while a GPU may hang: it may wait for all queued work. torch's own pinned memory has sizes of
        powers of two and would be up to twice as large.
        """
        self.pinned = True
        sources: dict[Keys, Tensor] = {}
        map_tensors(tree, lambda source, path: sources.update({path: source}) if source.is_cuda else None)
        memory, parts = in_one_piece(list(sources.values()))
        self._buffers.update(zip(sources, parts, strict=True))
        if memory.numel():
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            portable = 1  # for all GPUs
            try:
                torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))
            except RuntimeError as error:  # a limit on locked memory, say: copies are slower then, and as right
                log.warning("cannot page-lock %.1f MB for checkpoints: %s", memory.nbytes / 1e6, error)
                return
            self._memory = memory  # must outlive its registration
            weakref.finalize(self, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False

    def prepare(self, tree: Any, fences: int = 1) -> tuple[Any, Callable[[], None]]:
        """Prepare a copy of nested dicts, lists and tuples; plain data is copied at once.

        Args:
            tree: what to copy. A tensor that is new or has another shape gets new memory.
            fences: so many of the first tensors are copied before all others, so many of the last after them
                (`seqlock`).

        Returns:
            The copy, and the function that fills in its tensors. Any thread may call it. It passes all tensors to
            torch in three calls, so it rarely competes with the training for the interpreter.
        """
        buffers: dict[Keys, Tensor] = {}
        sources: list[Tensor] = []

        def buffer_for(source: Tensor, path: Keys) -> Tensor:
            # torch.save writes the whole storage of a view, so a view is copied even if nothing changes
            whole = source.device.type == "cpu" and source.untyped_storage().nbytes() == source.nbytes
            if self._still and whole:
                return source.detach()
            buffer = self._buffers.get(path)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                # with the same strides, so that a GPU needs no memory to rearrange them
                buffer = torch.empty_like(source, device="cpu", requires_grad=False)
            buffers[path] = buffer
            sources.append(source)
            return buffer

        prepared = map_tensors(tree, buffer_for)
        self._buffers = buffers
        return prepared, partial(self._copy, list(buffers.values()), sources, fences)

    @torch.no_grad()
    def _copy(self, targets: list[Tensor], sources: list[Tensor], fences: int) -> None:
        with ExitStack() as stack:
            for stream in self._streams:
                # the device as well, because a new thread starts with cuda:0
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            for part in (slice(0, fences), slice(fences, -fences), slice(-fences, None)):
                if targets[part]:
                    torch._foreach_copy_(targets[part], sources[part], non_blocking=True)
        for stream in self._streams:
            stream.synchronize()


def in_one_piece(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Host memory for copies of tensors, as bytes, and its parts in their dtypes, shapes and strides.

    Each part has its own storage, because `torch.save` writes whole storages.
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors))
    memory, parts = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8), []
    for tensor, begin in zip(tensors, [0, *ends], strict=False):
        part = torch.empty_like(tensor, device="meta")
        if tensor.numel():
            flat = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            parts.append(flat.as_strided(part.shape, part.stride()))
        else:
            parts.append(torch.empty_like(part, device="cpu"))
    return memory, parts


def map_tensors(tree: Any, change: Callable[[Tensor, Keys], Any], path: Keys = ()) -> Any:
    """Nested dicts, lists and tuples with each tensor replaced by ``change(tensor, path)``. torch's pytree would take
    seven times as long."""
    if isinstance(tree, Tensor):
        return change(tree, path)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, change, (*path, i)) for i, value in enumerate(tree))
    return tree


def dotted(path: tuple[object, ...]) -> str:
    """The name of a tensor in nested dicts and lists, as `named_tensors` makes it."""
    return ".".join(map(str, path))


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """All tensors in nested dicts and lists, by their dotted names."""
    found: dict[str, Tensor] = {}
    map_tensors(tree, lambda tensor, path: found.update({dotted(path): tensor}))
    return found

"""Host memory for copies of the state, allocated once and used again.

Fresh memory costs more than a copy into it: the kernel has to find and clear every page. So a checkpoint is copied
into memory that the one before has used, and written from there while the training goes on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .deadline import FOREVER, left

Path = tuple[object, ...]
"""Where in a tree: the keys and indices that lead there."""

ALIGNED = 64
"""Bytes; each tensor's memory begins at a multiple of it, as with torch's own on the CPU."""

PORTABLE = 1
"""CUDA's flag for memory that is page-locked for all GPUs."""


class Staging:
    """Memory for one copy. Who wants to use it takes it, copies, reads what was copied, and gives it back.

    These may be different threads: the one that trains takes it, the one that has written the copy gives it back.

    Args:
        devices: where the tensors to be copied are. Those of a GPU are copied on a stream of their own, beside a
            compute stream that may be stuck in a collective.
        still: nothing changes the state any more, so what is on the host is not copied: the last save of a run would
            otherwise be the peak of its memory.
    """

    def __init__(self, *devices: torch.device, still: bool = False) -> None:
        self._still = still
        self._taken = threading.Lock()
        self._buffers: dict[Path, Tensor] = {}
        self.pinned = False
        """Whether :meth:`pin` has been called."""
        gpus = [device for device in devices if device.type == "cuda"]
        self._streams = [torch.cuda.Stream(device) for device in gpus]  # type: ignore[no-untyped-call]

    def take(self, until: float = FOREVER) -> bool:
        """Keep all others out until :meth:`give_back`.

        Args:
            until: the moment to which to wait for who has it.

        Returns:
            Whether it is the caller's now.
        """
        return self._taken.acquire(timeout=left(until))

    def give_back(self) -> None:
        """Let the memory be overwritten. Any thread may say so."""
        self._taken.release()

    def pin(self, tree: Any) -> None:
        """Allocate page-locked memory for the tensors on a GPU, which can be copied at full speed.

        Not while a GPU may hang: it may wait for all that the GPU has been given to do. torch's own pinned memory would
        be up to twice as much, because it comes in powers of two.
        """
        self.pinned = True
        sources: dict[Path, Tensor] = {}
        map_tensors(tree, lambda source, path: sources.update({path: source}) if source.is_cuda else None)
        memory, parts = in_one_piece(list(sources.values()))
        self._buffers.update(zip(sources, parts, strict=True))
        if memory.numel():
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
            self._memory = memory  # is there until it has been unlocked
            weakref.finalize(self, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False

    def place(self, tree: Any, ends: int = 1) -> tuple[Any, Callable[[], None]]:
        """Memory for a copy of a tree of dicts, lists and tuples, and the function that copies the tensors into it.

        Plain data is copied here. The function may be called in another thread, which holds up no training and is held
        up by none, because it hands all tensors to torch at once. It copies the tree's first tensors before all others
        and the last ones after them, on each device. A tensor that is new or has another shape gets new memory.

        Args:
            tree: what is to be copied.
            ends: how many tensors are first, and how many last.
        """
        buffers: dict[Path, Tensor] = {}
        sources: list[Tensor] = []

        def buffer_for(source: Tensor, path: Path) -> Tensor:
            if self._still and _alone_on_host(source):
                return source.detach()
            buffer = self._buffers.get(path)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                # strides and all, so that a GPU needs no memory of its own for rearranging
                buffer = torch.empty_like(source, device="cpu", requires_grad=False)
            buffers[path] = buffer
            sources.append(source.detach())
            return buffer

        def copy() -> None:
            targets = list(buffers.values())
            with self._own_streams():
                for part in (slice(0, ends), slice(ends, -ends), slice(-ends, None)):
                    if targets[part]:
                        torch._foreach_copy_(targets[part], sources[part], non_blocking=True)

        placed = map_tensors(tree, buffer_for)
        self._buffers = buffers
        return placed, copy

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._streams:
                # the device as well, because a new thread starts out with cuda:0
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield
        for stream in self._streams:
            stream.synchronize()


def in_one_piece(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Host memory for copies of tensors.

    Returns:
        All of it, as bytes; and its parts, in the tensors' types, shapes and orders of memory. Each part has a storage
        of its own, because `torch.save` writes whole ones.
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors))
    memory, parts = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8), []
    for tensor, begin in zip(tensors, [0, *ends], strict=False):
        like = torch.empty_like(tensor, device="meta")
        if tensor.numel():
            part = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            parts.append(part.as_strided(like.shape, like.stride()))
        else:
            parts.append(torch.empty_like(like, device="cpu"))
    return memory, parts


def _alone_on_host(tensor: Tensor) -> bool:
    """Whether a tensor has host memory of its own. `torch.save` writes all of the memory that a view looks into."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes


def map_tensors(tree: Any, change: Callable[[Tensor, Path], Any], path: Path = ()) -> Any:
    """Nested dicts, lists and tuples with each tensor replaced by ``change(tensor, path)``, and all else as it is."""
    if isinstance(tree, Tensor):
        return change(tree, path)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, change, (*path, i)) for i, value in enumerate(tree))
    return tree

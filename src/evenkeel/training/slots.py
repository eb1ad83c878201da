"""The rows of a rank after its last two steps, in memory that outlives it.

In a sharded run no other rank has a rank's rows, so a survivor cannot save them. Each rank copies its own after every
step into memory that its keeper shares (`resilience.memory_checkpoint`). There are two slots, and a copy goes into the
older one: a kill in the middle of it leaves the other whole. A step's exchange needs all ranks, so no rank begins a
step before all have finished the one before. So the newest steps of ranks differ by one at most, and all ranks have
*the smallest of the newest*.

A slot is a file without a name: its step (0 while it is not whole) and where the rest is, tensors, and plain data. It
has no lock: its keeper reads it only after the end of the rank.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, _weights_only_unpickler

from ..common.deadlines import FOREVER, left
from ..common.errors import EndedHere
from ..resilience.slot_files import SLOT_HEAD, step_in
from .seqlock import Torn
from .staging import ALIGNED, Keys, Staging, map_tensors

HEAD = 4096
"""Bytes before the first tensor; they begin with `SLOT_HEAD`."""

PROTOCOL = 2
"""Of pickle, as in `torch.save`, whose archive takes five times as long."""

Layout = list[tuple[Keys, torch.dtype, tuple[int, ...]]]
"""Where in the state each tensor is, in the order in which they are stored."""


class Slot(Staging):
    """Memory for one copy, as a file that other processes can open.

    Args:
        descriptor: of the file, which this process does not close.
        devices: see :class:`Staging`.
    """

    def __init__(self, descriptor: int, *devices: torch.device) -> None:
        super().__init__(*devices)
        self._descriptor = descriptor
        self._static: list[Any] = []  # the layout, and the "rows" of the state
        self._end, self._static_bytes = HEAD, 0

    @property
    def step(self) -> int:
        """Of the state that is stored; 0: none is whole."""
        return step_in(self._descriptor)

    def prepare(self, tree: Any, fences: int = 1) -> tuple[Any, Callable[[], None]]:
        """As `Staging.prepare`, but of the tensors only "done" and "begun" are in the result; :func:`read` returns them
        all. From here on the slot is not whole."""
        clear(self._descriptor)
        sources: dict[Keys, Tensor] = {}
        plain = map_tensors(tree, lambda tensor, path: sources.update({path: tensor}))
        static = [[(path, it.dtype, tuple(it.shape)) for path, it in sources.items()], plain.pop("rows")]
        if static != self._static:  # in the first step only, unless the task's own state changes its shapes
            self._allocate(static)
        marks = {name: [self._buffers[name, i] for i in range(len(tree[name]))] for name in ("done", "begun")}
        copy = partial(self._copy, list(self._buffers.values()), list(sources.values()), fences)
        return plain | marks, copy

    def _allocate(self, static: list[Any]) -> None:
        self._end = _offsets(static[0])[-1]
        try:
            os.posix_fallocate(self._descriptor, 0, self._end)  # a page that is missing later is a SIGBUS
        except OSError as error:
            size = f"{self._end / 1e6:.0f} MB"
            raise EndedHere(f"--shard: no memory for this rank's rows ({size}, twice): {error.strerror}") from error
        self._buffers, self._static = _views(mmap.mmap(self._descriptor, self._end), static[0]), static
        self._static_bytes = os.pwrite(self._descriptor, pickle.dumps(static, PROTOCOL), self._end)

    def complete(self, captured: Mapping[str, Any], label: Mapping[str, Any]) -> None:
        """Store the plain data of a state whose tensors are here, and what else a reader must know. It is whole now."""
        size = os.pwrite(self._descriptor, pickle.dumps([captured, label], PROTOCOL), self._end + self._static_bytes)
        os.pwrite(self._descriptor, SLOT_HEAD.pack(captured["step"], self._end, self._static_bytes, size), 0)


def clear(descriptor: int) -> None:
    """Store no state in a slot from here on."""
    os.pwrite(descriptor, SLOT_HEAD.pack(0, 0, 0, 0), 0)


def read(descriptor: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state in a slot, whose tensors are in the slot's memory, and the label that was stored with it."""
    _, end, middle, size = SLOT_HEAD.unpack(os.pread(descriptor, SLOT_HEAD.size, 0))
    (layout, rows), (plain, label) = (
        _weights_only_unpickler.load(io.BytesIO(os.pread(descriptor, number, begin)), encoding="utf-8")
        for number, begin in ((middle, end), (size, end + middle))
    )
    return _filled(plain, _views(mmap.mmap(descriptor, end), layout)) | {"rows": rows}, label


class Slots:
    """The two slots of a rank. One thread writes at a time; any may.

    Args:
        descriptors: of two files.
        devices: where the state is.
    """

    def __init__(self, descriptors: Sequence[int], devices: Sequence[torch.device]) -> None:
        self._descriptors = list(descriptors)
        self._slots = [Slot(descriptor, *devices) for descriptor in descriptors]
        self._writing, self._frozen = threading.Lock(), False

    def steps(self) -> list[int]:
        """The steps that are stored, the older first."""
        return sorted({slot.step for slot in self._slots} - {0})

    def write(
        self, capture: Callable[[Staging], dict[str, Any]], label: Mapping[str, Any], until: float = FOREVER
    ) -> int:
        """Copy a state over the older one, unless its step is stored. Returns its step.

        Args:
            capture: `State.capture` into this memory.
            label: see :func:`read`; at least its "step".
            until: the moment until which to wait for another thread that writes.

        Raises:
            Torn: that thread hangs, or as `State.capture`.
        """
        if not self._writing.acquire(timeout=left(until)):
            raise Torn("a copy of the last step is still in progress")
        try:
            if label["step"] in self.steps():  # another thread has stored it; the older one must stay
                return int(label["step"])
            slot = min(self._slots, key=lambda slot: slot.step)
            captured = capture(slot)
            slot.complete(captured, {**label, "step": captured["step"]})  # a GPU may have undone that step
            return int(captured["step"])
        finally:
            self._writing.release()

    def freeze(self, until: float) -> list[int]:
        """Allow no further copies, because the process is ending. Returns the steps that are stored, the older first.

        Raises:
            Torn: a copy is still in progress at the moment ``until``.
        """
        if not self._frozen and not self._writing.acquire(timeout=left(until)):
            raise Torn("a copy of the last step is still in progress")
        self._frozen = True
        return self.steps()

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of this step, in memory of its own, and the label stored with it."""
        state, label = read(self.holding(step))
        return map_tensors(state, lambda tensor, _path: tensor.clone()), label

    def holding(self, step: int) -> int:
        """The descriptor of the slot with this step."""
        return next(each for each in self._descriptors if step_in(each) == step)

    def keep_run(self, run_id: str) -> None:
        """Discard the steps of every other run, such as one that --fresh has moved aside."""
        for each in self._descriptors:
            if step_in(each) and read(each)[1]["run_id"] != run_id:
                clear(each)

    def keep_only(self, step: int) -> None:
        """Discard every other step, because the run goes on from this one; 0: from none."""
        for each in self._descriptors:
            if step_in(each) != step:
                clear(each)


def _offsets(layout: Layout) -> list[int]:
    """Where each tensor begins, and where the last one ends."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in layout]
    return list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=HEAD))


def _views(memory: mmap.mmap, layout: Layout) -> dict[Keys, Tensor]:
    """Tensors in a slot's memory, each with its own storage, because `torch.save` writes whole storages."""
    found: dict[Keys, Tensor] = {}
    for (path, dtype, shape), offset in zip(layout, _offsets(layout), strict=False):
        number = torch.Size(shape).numel()
        flat = torch.frombuffer(memory, dtype=dtype, count=number, offset=offset) if number else torch.empty(0)
        found[path] = flat.to(dtype).view(shape)
    return found


def _filled(tree: Any, tensors: Mapping[Keys, Tensor], path: Keys = ()) -> Any:
    """Plain data with each tensor at its place."""
    if path in tensors:
        return tensors[path]
    if isinstance(tree, dict):
        return {key: _filled(value, tensors, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_filled(value, tensors, (*path, i)) for i, value in enumerate(tree))
    return tree

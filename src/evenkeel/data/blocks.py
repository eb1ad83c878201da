"""An order of samples in which blocks of neighbours are read together, computed position by position.

In the usual order (`shuffle`) any sample may follow any other, so files are read at random. Here the blocks are
permuted first. Then the samples of each window, which is a number of consecutive blocks in that order, are permuted.
A job reads from one window at a time. Both permutations are keyed by (seed, epoch), so the position in an
epoch is still one integer, for any number of ranks. Memory: some 40 bytes per block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..common.errors import Refusal
from .shuffle import Array, shuffled

Integers = NDArray[np.int64]


class Blocks:
    """The division of a data set into blocks. Returned by its method `order_blocks()`, if it has one.

    Args:
        lengths: samples of each block, in the order of the data set.
        window: blocks whose samples are mixed. About this many are read from at a time.

    Example:
        >>> blocks = Blocks([2, 2, 2, 2], window=2)
        >>> blocks.shuffled(np.arange(8, dtype=np.uint64), seed=0, epoch=0).tolist()
        [1, 0, 2, 3, 6, 5, 4, 7]
    """

    def __init__(self, lengths: Sequence[int] | Integers, window: int) -> None:
        counts = np.asarray(lengths, dtype=np.int64)
        self.lengths: Integers = counts[counts > 0]
        self.window = window

    @property
    def name(self) -> str:
        """The record of this order in a run; another name means another order."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()[:16]
        return f"{len(self.lengths)} blocks ({digest}) in windows of {self.window}"

    def among(self, indices: Sequence[int]) -> Blocks | None:
        """The blocks of these samples only; None if the indices do not increase."""
        chosen = np.asarray(indices, dtype=np.int64)
        if np.any(np.diff(chosen) <= 0):
            return None
        return Blocks(np.diff(np.searchsorted(chosen, np.append(0, self.lengths.cumsum()))), self.window)

    def shuffled(self, positions: Array, seed: int, epoch: int) -> Array:
        """Return the samples at some positions of an epoch's order, as `shuffle.shuffled` does; uint64, shape [n]."""
        ends, lasts, windows = _layout(self, seed, epoch)
        places = positions.astype(np.int64)
        mine = np.searchsorted(windows, places, side="right") - 1
        for number in np.unique(mine).tolist():
            start, end, here = int(windows[number]), int(windows[number + 1]), mine == number
            offsets = (places[here] - start).astype(np.uint64)
            inside = shuffled(offsets, end - start, seed, epoch, f"window {number}")
            places[here] = start + inside.astype(np.int64)
        block = np.searchsorted(ends, places, side="right")
        return (lasts[block] - (ends[block] - places)).astype(np.uint64)


class _Layout(NamedTuple):
    """The blocks of one epoch, in the epoch's order."""

    ends: Integers  # the position at which each ends, [B]
    lasts: Integers  # one past the last sample of each, [B]
    windows: Integers  # the positions at which windows begin, and the end of the last, [K + 1]


@lru_cache(maxsize=4)
def _layout(blocks: Blocks, seed: int, epoch: int) -> _Layout:
    number = len(blocks.lengths)
    order = shuffled(np.arange(number, dtype=np.uint64), number, seed, epoch, "blocks").astype(np.int64)
    ends = blocks.lengths[order].cumsum()
    windows = max(1, round(number / blocks.window))  # of nearly equal size: a small last one would mix little
    cuts = np.arange(windows + 1) * number // windows
    return _Layout(ends, blocks.lengths.cumsum()[order], np.append(0, ends)[cuts])


def blocks_of(dataset: Any) -> Blocks | None:
    """The blocks of a data set that has the method `order_blocks`; None: it is read in the usual order.

    Raises:
        Refusal: they do not have as many samples as the data set.
    """
    method = getattr(dataset, "order_blocks", None)
    blocks: Blocks | None = method() if callable(method) else None
    if blocks is None:
        return None
    found = int(blocks.lengths.sum()) if isinstance(blocks, Blocks) else -1
    if found != len(dataset) or blocks.window < 1:
        raise Refusal(
            f"order_blocks() of a data set of {len(dataset)} samples returned {type(blocks).__name__} of {found} "
            "samples; return Blocks(lengths, window) whose lengths add up to the data set's, or None"
        )
    return blocks

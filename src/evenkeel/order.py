"""The order of samples, computed position by position.

Shuffling 10^9 samples with `torch.randperm` takes 8 GB on every rank and must be repeated to resume. A
keyed bijection on 0 .. N-1 needs no memory at all and answers "which sample stands at position p of epoch
e?" for any p at once, which is what makes a resume in mid-epoch, at another world size, cost nothing.

The bijection is a generalised Feistel network (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002): write p as a pair (left, right) on an a x b grid that just covers N, and let each half in turn
be shifted by a keyed hash of the other, modulo its own size. Each round can be undone, so the whole is a
permutation of the grid. The grid has up to 3*sqrt(N) cells too many; a sample that lands there is sent
through again until it falls inside ("cycle walking"), which keeps it a permutation of 0 .. N-1.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from .randomness import derive

Array = NDArray[np.uint64]


def shuffled(positions: Array, samples: int, seed: int, epoch: int) -> Array:
    """The samples that stand at some positions of an epoch's order.

    Args:
        positions: any positions in 0 .. samples-1, shape [n], uint64.
        samples: N, the size of the data set.
        seed: the run's seed.
        epoch: every epoch has an order of its own.

    Returns:
        Sample indices, shape [n], uint64. Over all N positions each index comes exactly once.
    """
    columns = isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    rows += rows % 2  # with both sides odd every shift is an even permutation, and half of all orders never come
    keys = [np.uint64(derive(seed, "order", epoch, i)) for i in range(_rounds(samples))]
    out = positions.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        out[walking] = _feistel(out[walking], np.uint64(rows), np.uint64(columns), keys)
        walking = walking[out[walking] >= samples]
    return out


def _feistel(cells: Array, rows: np.uint64, columns: np.uint64, keys: list[np.uint64]) -> Array:
    left, right = cells // columns, cells % columns
    for i in range(0, len(keys), 2):
        left = (left + _hash(right, keys[i]) % rows) % rows
        right = (right + _hash(left, keys[i + 1]) % columns) % columns
    return left * columns + right


def _hash(x: Array, key: np.uint64) -> Array:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a well-mixing 64-bit bijection."""
    x = x + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed


def _rounds(samples: int) -> int:
    """Shifts in all, half of them for each side of the pair.

    With few cells a shift mixes little: below 7 samples, where all orders can be counted, 8 rounds favour some
    of them and 16 do not (`tests/test_order.py`).
    """
    return 16 if samples <= 4096 else 8

"""The order of samples, computed position by position.

Shuffling 10^9 samples with `torch.randperm` takes 8 GB on every rank, and again at each resume. A keyed bijection on
0 .. N-1 takes no memory and maps any position of any epoch to its sample, so a resume in mid-epoch costs
nothing.

It is a generalised Feistel network (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002): write a
position as a pair (left, right) on a grid that just covers N, and shift each half in turn by a keyed hash of the other,
modulo its own size. Each round can be inverted, so it permutes the grid. The grid has up to 3*sqrt(N) excess cells; a
position that lands there is permuted again until it lands below N ("cycle walking"). So 0 .. N-1 are permuted.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from .randomness import derive

Array = NDArray[np.uint64]


def shuffled(positions: Array, samples: int, seed: int, epoch: int, purpose: str = "order") -> Array:
    """Return the samples at some positions of an epoch's order.

    Args:
        positions: any of 0 .. samples-1, shape [n], uint64.
        samples: N, the size of the data set.
        seed: the run's.
        epoch: each has its own order.
        purpose: each purpose has its own order, too.

    Returns:
        Sample indices, shape [n], uint64. Over all N positions each comes exactly once.
    """
    columns = isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    rows += rows % 2  # if both sides were odd, every shift would be an even permutation: only half of all orders
    keys = [np.uint64(derive(seed, purpose, epoch, i)) for i in range(_rounds(samples))]
    out = positions.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        out[walking] = _feistel(out[walking], np.uint64(rows), np.uint64(columns), keys)
        walking = walking[out[walking] >= samples]
    return out


def _feistel(cells: Array, rows: np.uint64, columns: np.uint64, keys: list[np.uint64]) -> Array:
    left, right = cells // columns, cells % columns
    for i in range(0, len(keys), 2):
        left = (left + mixed(right, keys[i]) % rows) % rows
        right = (right + mixed(left, keys[i + 1]) % columns) % columns
    return left * columns + right


def mixed(x: Array, key: np.uint64) -> Array:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a 64-bit bijection that mixes well."""
    x = x + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: Array = x ^ (x >> np.uint64(31))
    return out


def _rounds(samples: int) -> int:
    """Shifts, half of them of each side. With 8, fewer than 7 samples would be biased; 4096 leaves a wide margin."""
    return 16 if samples <= 4096 else 8

"""A curve thinned out for the eye, and smoothed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

MOST = 2000
"""Points of a curve in a figure."""

SMOOTHED = 50
"""A curve of fewer points is shown as it is."""

Numbers = npt.NDArray[np.float64]
Values = Sequence[float] | Numbers


def thinned(steps: Values, values: Values, most: int = MOST) -> tuple[Numbers, Numbers]:
    """At most so many points: the first and the last one, and the least and the greatest value of each stretch."""
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(x) <= most:
        return x, y
    cuts = np.linspace(1, len(x) - 1, (most - 2) // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in pairwise(cuts):
        kept |= {begin + int(np.argmin(y[begin:end])), begin + int(np.argmax(y[begin:end]))}
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def smoothed(values: Values) -> Numbers:
    """The mean of the values around each one: a twenty-fifth of all, less at both ends."""
    y = np.asarray(values, dtype=np.float64)
    half, here = max(4, len(y) // 50), np.arange(len(y))
    begin, end = np.maximum(here - half, 0), np.minimum(here + half + 1, len(y))
    sums = np.concatenate([[0.0], np.cumsum(y)])
    means = (sums[end] - sums[begin]) / (end - begin)
    return np.asarray(np.clip(means, y.min(), y.max()))  # a constant stays one, whatever was rounded

"""Whether the data is what it was: a few samples of each set, boiled down to what can be compared.

A split that is drawn when a file is imported is another one in each process; a folder on one node may hold other files,
as many as there were. Nothing fails, and some samples come twice, some never, or the test has what was trained on. So
each start reads a few samples as the training will, by number and with their random numbers, and compares them among
ranks and with the run so far.

Not bit by bit: decoders, and vector units under a transform, differ a little among machines. Kinds, shapes, whole
numbers and the ends of texts (a path's beginning is the node's own) must be equal, real numbers and pixels nearly so:
kept of them are size and mean, and how what is left without the mean projects on a few vectors of random signs. Objects
count by their type alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from .config import Config
from .data import Indices, Seeded, SizedDataset, in_order, with_parts
from .plan import MicroBatch
from .randomness import generators_kept

Digest = Mapping[str, Any]
"""Of one data set: what must be "equal", as 16 hexadecimal digits, and numbers that must be "near"."""
Digests = dict[str, Digest]
"""By name of the data, "training" and "test". One without a digest cannot be compared."""

ONCE, TWICE, OFTEN = 1, 2, 10
"""Times that samples are read: when a run is continued, when it is new, and before it is believed that they differ."""

LONGEST = 4096
"""Values of a tensor that count, taken evenly from all of it."""

SIGNS = 8
"""Vectors of random signs. That unlike data comes near to all of them is one chance in some millions."""

TOLERANCE = 0.25
"""By how much a projection may differ. The largest of a pair's differences, for 100 made-up images: 0.5 or more, mostly
2.6, between two of them; up to 0.2 after saving one as JPEG, which is worse than any two decoders of one file."""

WEIGHT = 4
"""Of size and mean, which are known better: they may differ by 6 %."""


def look(config: Config, train_set: SizedDataset, test_set: SizedDataset, times: int) -> tuple[Digests, list[str]]:
    """Read a few samples of each set so many times, in a loader process if there are to be any: what is opened at the
    first read (an HDF5 file, say) must not be shared with the loaders.

    Returns:
        The digests, and the names of the sets whose samples are others each time, which have none. Nor has one that
        cannot be read: the training will say why, if it is so still.
    """
    sets = {"training": Seeded(train_set, config.seed, "train"), "test": Seeded(test_set, config.seed, "test")}
    with generators_kept():
        try:
            found = in_order(_Looks(list(sets.values())), [*range(len(sets))] * times, config.num_workers > 0)
        except RuntimeError:  # the loader process has died
            return {}, []
    seen = {name: found[number :: len(sets)] for number, name in enumerate(sets)}
    whole = {name: digests for name, digests in seen.items() if None not in digests}
    unsteady = [name for name, (first, *more) in whole.items() if not all(alike(first, other) for other in more)]
    return {name: digests[0] for name, digests in whole.items() if name not in unsteady}, unsteady


def difference(known: Digests, of_ranks: Sequence[Digests]) -> str:
    """In a line, which data is not what the run has had, or not what rank 0 has, and what to do; empty if all is."""
    for rank, digests in enumerate(of_ranks):
        for name, digest in digests.items():
            if not alike(digest, of_ranks[0].get(name, digest)):
                return (
                    f"the {name} data of rank {rank} is not that of rank 0, although it is as large; give all nodes "
                    "the same data, and let a task split it at random in train_dataset() and test_dataset(), which are "
                    "seeded, not on import; or, if it is meant to differ, add --other-data"
                )
            if not alike(digest, known.get(name, digest)):
                return (
                    f"the {name} data is not what it was, although it is as large: samples have changed, or their "
                    "order, or a transform; bring back the data of the run, start over with --fresh, or, if it is "
                    "meant to change, add --other-data"
                )
    return ""


def digest(batch: Any) -> Digest:
    """What a batch comes to."""
    equal: list[str] = []
    near: list[float] = []
    _take(batch, equal, near)
    return {"equal": hashlib.sha256("\0".join(equal).encode()).hexdigest()[:16], "near": near}


def alike(one: Digest, other: Digest) -> bool:
    """Whether two digests may be of the same data."""
    pairs = list(zip(one["near"], other["near"], strict=False))
    return one["equal"] == other["equal"] and all(abs(a - b) <= TOLERANCE for a, b in pairs)


class _Looks(Dataset[Any]):
    """Data sets by number, each as its digest; None where it cannot be read."""

    def __init__(self, sets: Sequence[Seeded]) -> None:
        self.sets = sets

    def __getitem__(self, number: int) -> Digest | None:
        last = len(self.sets[number]) - 1
        chosen = sorted({0, last // 3, 2 * last // 3, last})
        try:
            return digest(self.sets[number].__getitems__(Indices(chosen, 0, MicroBatch(0, 0, 0, len(chosen)))))
        except Exception:
            return None


def _take(part: Any, equal: list[str], near: list[float]) -> Any:
    """Add what a part of a batch comes to; returns it."""
    if isinstance(part, float | np.ndarray | np.generic) and np.asarray(part).dtype.kind in "biufc":
        part = torch.as_tensor(part)
    equal.append(type(part).__name__)
    if isinstance(part, Tensor):
        values = part.detach().cpu()
        equal.append(f"{values.dtype} {list(values.shape)}")
        if values.dtype == torch.uint8 or values.is_floating_point() or values.is_complex():
            real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
            near.extend(_projections(real.flatten()[:: max(1, -(-real.numel() // LONGEST))].double().numpy()))
        else:
            equal.append(hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest())
    elif isinstance(part, str | bytes | int | None):
        equal.append(str(part).rpartition("/")[2])
    else:
        if isinstance(part, Mapping):  # in one order: it may be a set's, which is another in each process
            part = dict(sorted(part.items(), key=lambda item: str(item[0])))
            equal.extend(map(str, part))
        with_parts(part, lambda inner: _take(inner, equal, near))
    return part


def _projections(values: NDArray[np.float64]) -> list[float]:
    values = np.nan_to_num(values, posinf=0, neginf=0).clip(-1e100, 1e100)  # whose squares are finite
    size, mean = float(np.linalg.norm(values)) + 1e-12, float(values.mean()) if len(values) else 0.0
    middle, rest = mean * len(values) ** 0.5 / size, values - mean
    found = _signs()[:, : len(values)] @ rest / (np.linalg.norm(rest) + 1e-3 * size)  # not of rounding errors alone
    return [round(number, 3) for number in (WEIGHT * math.log(size), WEIGHT * middle, *found.tolist())]


@cache
def _signs() -> NDArray[np.float64]:
    return np.random.RandomState(0).choice((-1.0, 1.0), (SIGNS, LONGEST))  # a stream that NumPy never changes

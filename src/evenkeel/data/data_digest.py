"""A digest of a few samples of each data set, compared among ranks and with earlier starts of the run.

A random split drawn on import differs between processes, and a folder on one node may have other files. Nothing fails,
but some samples are used twice and others never. Types, shapes, integers and the last part of strings (paths differ
between nodes; in a stream all of a string that is not a path) must be equal; floats and pixels nearly equal, because
decoders and vector units differ a little.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..common.errors import Refusal, place_of
from ..common.naming import TRAIN
from ..config import Config
from .batch import dense, with_parts
from .dataset import SizedDataset
from .loader import Loader, Seeded
from .plan import MicroBatch
from .randomness import generators_kept
from .sampler import Indices

Digest = Mapping[str, Any]
"""Of one data set: "equal", 16 hexadecimal digits, and "near", a list of numbers."""
Digests = dict[str, Digest]
"""By name of the data set; one that cannot be compared is left out."""

TRAINING = "training"
"""The name of the training data here and in status.json; sets of the evaluation have the task's names."""

# how often samples are read: when a run is continued, when it is new, and before a difference is refused
ONCE, TWICE, OFTEN = 1, 2, 10
LONGEST = 4096  # the maximum number of values of a tensor to use, evenly spaced
SIGNS = 8  # projections on random signs; different data agree in all of them once in some millions
# How far projections may differ. Any two of 100 images differ by at least 0.5 in one of them, mostly by 2.6; saving an
# image as JPEG, worse than any two decoders, by up to 0.2. Norm and mean may differ by TOLERANCE / WEIGHT, 6 %.
TOLERANCE, WEIGHT = 0.25, 4
CLOSE = 0.02
"""The same for data that a model has made twice: more than the arithmetic of another device, less than a few steps."""


def in_order(dataset: Dataset[Any], numbers: Sequence[int], in_worker: bool) -> list[Any]:
    """Read these items of a data set, here or in one loader process."""
    return list(Loader(dataset, batch_size=None, sampler=numbers, num_workers=int(in_worker)))


def one_sample(dataset: SizedDataset, seed: int, in_worker: bool) -> Any:
    """A batch of the first sample only, for checks before the training. Read as in :func:`in_order`."""
    (batch,) = in_order(_First(Seeded(dataset, seed, "train")), [0], in_worker)
    return batch


class _First(Dataset[Any]):
    def __init__(self, seeded: Seeded) -> None:
        self._seeded = seeded

    def __getitem__(self, _number: int) -> Any:
        if first := getattr(self._seeded.dataset, "first_samples", None):  # a stream must not be read through
            return self._seeded.collated(first()[:1])
        return self._seeded.__getitems__(Indices([0], 0, MicroBatch(0, 0, 0, 1)))


def digest_samples(config: Config, sets: Mapping[str, SizedDataset], times: int) -> tuple[Digests, list[str]]:
    """Read a few samples of each set this many times; return digests, and names of sets that differ between reads.

    These have no digest if they differ much; nor have sets that cannot be read: the training reports the reason. If
    there will be loader processes, one of them reads, because a file opened at the first read must not be shared with
    them.

    Raises:
        Refusal: a stream yields other samples at each read, so that a run cannot resume in it; or a set has its first
            sample, but not all of them.
    """
    seeded = [Seeded(it, config.seed, TRAIN if name == TRAINING else name) for name, it in sets.items()]
    with generators_kept():
        try:
            found = in_order(_Digests(seeded), [*range(len(sets))] * times, config.num_workers > 0)
        except RuntimeError:  # the loader process has died
            return {}, []
    seen = {name: found[number :: len(sets)] for number, name in enumerate(sets)}
    for name, digests in seen.items():
        if why := next((it for it in digests if isinstance(it, str)), ""):
            raise Refusal(
                f"the {name} data has {len(sets[name])} samples by its __len__, but not all that a start reads are "
                f"there: {why}; let __len__ return the number of samples"
            )
    whole = {name: digests for name, digests in seen.items() if None not in digests}
    streams = {name for name, it in sets.items() if hasattr(it, "first_samples")}
    unsteady = [name for name, digests in whole.items() if not _all_alike(digests, exactly=True)]
    apart = [name for name in unsteady if name in streams or not _all_alike(whole[name], exactly=False)]
    for name in streams:
        if name in unsteady or (name not in whole and any(seen[name])):
            raise Refusal(
                f"the {name} data is a stream that is another each time that it is opened, or after seek_sample(), so "
                "a run cannot go on with it; begin anew in each iter(), draw from torch's, NumPy's or Python's global "
                "generator, which are seeded for each sample, draw an order when the source is opened, and do not go "
                "by ranks and processes"
            )
    return {name: digests[0] for name, digests in whole.items() if name not in apart}, unsteady


def difference(known: Digests, of_ranks: Sequence[Digests]) -> str:
    """Say in a line which data differs from rank 0's or from the run's, and what to do; empty if none does."""
    for rank, digests in enumerate(of_ranks):
        for name, digest in digests.items():
            if not alike(digest, of_ranks[0].get(name, digest)):
                return (
                    f"the {name} data of rank {rank} differs from rank 0's, although it has as many samples; give all "
                    "nodes the same data, and split it at random in train_dataset() and test_dataset(), which are "
                    "seeded, not on import; or, if it is meant to differ, add --other-data"
                )
            if not alike(digest, known.get(name, digest)):
                return (
                    f"the {name} data has changed, although it has as many samples: the samples, their order or a "
                    "transform; bring back the data of the run, start over with --fresh, or, if the change is meant, "
                    "add --other-data"
                )
    return ""


def digest(batch: Any, whole: bool = False) -> Digest:
    """Return the digest of a batch. ``whole``: all of a string counts, unless it is a path."""
    equal: list[str] = []
    near: list[float] = []
    _add(batch, equal, near, whole)
    return {"equal": hashlib.sha256("\0".join(equal).encode()).hexdigest()[:16], "near": near}


def of_tensors(dataset: SizedDataset) -> Digest | None:
    """The digest of all samples of a data set of tensors; None for other data sets."""
    rows = Seeded(dataset, 0, TRAIN).rows
    if rows is None:
        return None
    return digest([*rows.tensors, *(torch.as_tensor(list(chosen)) for chosen in rows.subsets)])


def alike(one: Digest, other: Digest, tolerance: float = TOLERANCE) -> bool:
    """Whether two digests may be of the same data."""
    pairs = zip(one["near"], other["near"], strict=False)
    return one["equal"] == other["equal"] and all(abs(a - b) <= tolerance for a, b in pairs)


def _all_alike(digests: Sequence[Digest], exactly: bool) -> bool:
    """Whether reads of one data set on one machine agree; ``exactly``: to the last digit, as required of a stream."""
    return all(digests[0] == other or (not exactly and alike(digests[0], other)) for other in digests)


class _Digests(Dataset[Any]):
    """The digests of data sets, by number; None if a set cannot be read; the error if only its first sample can."""

    def __init__(self, sets: Sequence[Seeded]) -> None:
        self.sets = sets

    def __getitem__(self, number: int) -> Digest | str | None:
        last = len(self.sets[number]) - 1
        chosen = sorted({0, last // 3, 2 * last // 3, last})
        try:
            if first := getattr(self.sets[number].dataset, "first_samples", None):  # a stream must not be read through
                return digest(self.sets[number].collated(first()), whole=True)
            return digest(self.sets[number].__getitems__(Indices(chosen, 0, MicroBatch(0, 0, 0, len(chosen)))))
        except IndexError as error:
            with suppress(Exception):
                self.sets[number].__getitems__(Indices([0], 0, MicroBatch(0, 0, 0, 1)))
                return f"IndexError: {error}{place_of(error.__traceback__)}"
        except Exception:
            return None
        return None


def _add(part: Any, equal: list[str], near: list[float], whole: bool) -> Any:
    if isinstance(part, float | np.ndarray | np.generic) and np.asarray(part).dtype.kind in "biufc":
        part = torch.as_tensor(part)
    equal.append(type(part).__name__)
    if isinstance(part, Tensor):
        for values in dense(part.detach().cpu()):
            equal.append(f"{values.dtype} {list(values.shape)}")
            if values.dtype == torch.uint8 or values.is_floating_point() or values.is_complex():
                real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
                near.extend(_projections(real.flatten()[:: max(1, -(-real.numel() // LONGEST))].double().numpy()))
            else:
                equal.append(hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest())
    elif isinstance(part, str | bytes | int | None):
        text = str(part)
        is_path = text.startswith("/") and not any(map(str.isspace, text))
        equal.append(text if whole and not is_path else text.rpartition("/")[2])
    else:
        if isinstance(part, Mapping):  # sorted, because keys may come from a set
            part = dict(sorted(part.items(), key=lambda item: str(item[0])))
            equal.extend(map(str, part))
        with_parts(part, lambda inner: _add(inner, equal, near, whole))
    return part


def _projections(values: NDArray[np.float64]) -> list[float]:
    """Norm, mean, and projections of the rest, rounded for a file."""
    values = np.nan_to_num(values, posinf=0, neginf=0).clip(-1e100, 1e100)  # so that squares are finite
    norm, mean = float(np.linalg.norm(values)) + 1e-12, float(values.mean()) if len(values) else 0.0
    middle, rest = mean * len(values) ** 0.5 / norm, values - mean
    found = _signs()[:, : len(values)] @ rest / (np.linalg.norm(rest) + 1e-3 * norm)  # not of rounding errors alone
    return [round(number, 3) for number in (WEIGHT * math.log(norm), WEIGHT * middle, *found.tolist())]


@cache
def _signs() -> NDArray[np.float64]:
    return np.random.RandomState(0).choice((-1.0, 1.0), (SIGNS, LONGEST))  # NumPy never changes these numbers

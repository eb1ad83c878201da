"""Map-style data sets: in memory, limited, and fetched a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import index
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from ..common.errors import Refusal, place_of
from ..common.naming import kind_of
from .blocks import Blocks, blocks_of
from .sampler import Indices
from .shuffle import shuffled

TOLD = "_evenkeel_epoch"
"""Attribute of a data set with the epoch that its `set_epoch` was called with."""


class SizedDataset(Protocol):
    """Any map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class InMemory(TensorDataset):
    """Tensors of equal length, each of shape [N, ...]; a micro-batch is one index operation per tensor, in a tuple."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return a collated micro-batch, each tensor of shape [len(indices), ...]."""
        rows = torch.as_tensor(indices)
        return tuple(tensor[rows] for tensor in self.tensors)


def limited(dataset: SizedDataset, samples: int, method: str = "train_dataset") -> SizedDataset:
    """Take this many samples, evenly spaced because files are often sorted by class; 0 takes all.

    Raises:
        Refusal: the task's `method` did not return a map-style data set.
    """
    size = length(dataset, method)
    return Limited(dataset, [i * size // samples for i in range(samples)]) if 0 < samples < size else dataset


def split(dataset: SizedDataset, fraction: float, seed: int) -> tuple[Limited, Limited]:
    """Split off a fraction of a data set: return the rest and that; depends on the number of samples and the seed."""
    size = length(dataset, "train_dataset")
    order = np.arange(size, dtype=np.uint64)
    order = shuffled(order, size, seed, 0) if size else order
    cut = min(max(1, round(fraction * size)), size)
    return Limited(dataset, sorted(order[cut:].tolist())), Limited(dataset, sorted(order[:cut].tolist()))


class Limited(Dataset[Any]):
    """The samples at some indices. Unlike torch's `Subset`, it leaves collation to a data set that does its own."""

    def __init__(self, dataset: SizedDataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices
        if isinstance(parts := getattr(dataset, "stand_ins", None), list):  # it draws samples in place of bad ones
            parts.append(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def order_blocks(self) -> Blocks | None:
        """The blocks of the base data set, reduced to these samples."""
        blocks = blocks_of(self.dataset)
        return blocks and blocks.among(self.indices)

    def __getitems__(self, indices: Indices) -> Any:
        """Return the base data set's micro-batch, or a list of samples."""
        if (fetch_all := whole_fetch(self.dataset)) is None:
            return [self[index] for index in indices]
        return fetch_all(Indices([self.indices[index] for index in indices], indices.epoch, indices.micro_batch))


def chosen_of(whole: Any, part: Any) -> Sequence[int] | None:
    """The indices in a data set of the samples of a part made by `limited` and `split`; None: the part is the whole."""
    chosen: Sequence[int] | None = None
    while part is not whole:
        if isinstance(part, Limited):
            chosen = part.indices if chosen is None else [part.indices[number] for number in chosen]
        part = part.dataset
    return chosen


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Call `set_epoch` of a data set, or of the one inside subsets, unless the last call was for this epoch.

    The epoch is stored in the data set itself, because several readers may share it, such as two parts of a split.
    """
    while isinstance(dataset, (Subset, Limited)) and not hasattr(dataset, "set_epoch"):
        dataset = dataset.dataset
    if callable(tell := getattr(dataset, "set_epoch", None)) and getattr(dataset, TOLD, None) != epoch:
        tell(epoch)
        with suppress(AttributeError):  # it has slots; then `set_epoch` is called each time
            object.__setattr__(dataset, TOLD, epoch)


class Collated(Dataset[Any]):
    """A data set with a task's own collate function, which `Seeded` calls. All else is the data set's own."""

    def __init__(self, dataset: SizedDataset, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # looked up when it is copied
            raise AttributeError(name)
        return getattr(self.dataset, name)


def sample_of(dataset: Any, index: int) -> Any:
    """Read a sample; an error gets a note of its index in the user's own data set."""
    try:
        return dataset[index]
    except Exception as error:
        # `reason_of` reads it; Python shows it in a traceback from 3.11 on
        with suppress(Exception):  # its attributes are read-only, as those of a frozen dataclass
            note = f"(sample {inner_index(dataset, index)})"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
        raise


def inner_index(dataset: Any, index: int) -> int:
    """The index of a sample in the data set inside subsets."""
    while type(dataset) in (Subset, Limited):
        dataset, index = dataset.dataset, dataset.indices[index]
    return index


def reader_of(dataset: Any) -> Any:
    """The method that returns the samples of a data set, or of the one inside subsets."""
    while type(dataset) in (Subset, Limited):
        dataset = dataset.dataset
    return getattr(type(dataset), "__getitems__", getattr(type(dataset), "__getitem__", None))


def whole_fetch(dataset: SizedDataset, samples: bool = False) -> Callable[[Indices], Any] | None:
    """Return a data set's method that fetches a whole micro-batch; None if it fetches sample by sample.

    ``samples``: return samples, so do not use :class:`InMemory`'s own batch.
    """
    if isinstance(dataset, Limited):
        return dataset.__getitems__ if whole_fetch(dataset.dataset, samples) else None
    if samples and getattr(type(dataset), "__getitems__", None) is InMemory.__getitems__:
        return None
    # torch's `__getitems__` only loops over samples here, and they must be seeded one by one
    return None if isinstance(dataset, (Subset, StackDataset)) else getattr(dataset, "__getitems__", None)


class Rows:
    """Fetches micro-batches of a data set of tensors by one index operation per tensor; draws no random numbers.

    `subsets` are the indices of nested subsets, the outermost first; `as_tuple` returns a tuple, as `InMemory` does.
    """

    def __init__(self, tensors: Sequence[Tensor], subsets: Sequence[Sequence[int]], as_tuple: bool) -> None:
        self.tensors, self.subsets, self.as_tuple = tensors, subsets, as_tuple

    @classmethod
    def of(cls, dataset: Any) -> Rows | None:
        """Make one for a `TensorDataset`, `InMemory` or subsets of one; None for data sets with their own code."""
        subsets, as_tuple = [], True
        while type(dataset) in (Subset, Limited):  # not a subclass, which may have its own __getitem__
            subsets.append(dataset.indices)
            as_tuple &= type(dataset) is Limited
            dataset = dataset.dataset
        if type(dataset) not in (TensorDataset, InMemory) or not all(map(_is_plain, dataset.tensors)):
            return None
        return cls(dataset.tensors, subsets, as_tuple and type(dataset) is InMemory)

    def __call__(self, indices: Indices) -> Any:
        """Return a collated micro-batch, each tensor of shape [len(indices), ...]."""
        samples: Any = indices.array
        for chosen in self.subsets:
            samples = [index(chosen[number]) for number in samples]
        rows = torch.as_tensor(samples)
        if self.as_tuple:
            return tuple(tensor[rows] for tensor in self.tensors)
        rows = torch.where(rows < 0, rows + len(self.tensors[0]), rows) if self.subsets else rows
        return [tensor.index_select(0, rows) for tensor in self.tensors]  # contiguous, as stacked samples are


def _is_plain(tensor: Any) -> bool:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_nested:
        return False
    return tensor.dim() < 5 or tensor.is_contiguous()  # samples of others are stacked in their own layout


def length(dataset: Any, method: str) -> int:
    """Return the number of samples of a data set.

    Raises:
        Refusal: it is not a map-style data set, or its length is not a valid number. The message names the task's
            method that returned it.
    """
    none = (None,) if hasattr(type(dataset), "__getitems__") else (None, Dataset.__getitem__)  # torch's only raises
    lacks = [name for name in ("__len__", "__getitem__") if getattr(type(dataset), name, None) in none]
    if isinstance(dataset, IterableDataset) or lacks:
        why = f"has no {' and no '.join(lacks)}" if lacks else "is an IterableDataset"
        train = method == "train_dataset"
        stream = "`Streams` (docs/streams.md)" if train else "a list, such as list(itertools.islice(stream, 1000))"
        if isinstance(dataset, DataLoader):
            more = "return its data set; --batch-size and --num-workers do the rest"
            raise Refusal(f"{method}() returned a DataLoader: {more}")
        if dataset is None:
            raise Refusal(f"{method}() returned None: is a `return` missing?")
        raise Refusal(
            f"{method}() returned {kind_of(dataset)}, which {why}: Evenkeel fetches samples by index, so that a run "
            f"can resume at any step; return a map-style data set, with __len__ and __getitem__(index), or for streams "
            f"{stream}"
        )
    parts = [*dataset.values()] if isinstance(dataset, dict) else dataset if isinstance(dataset, (list, tuple)) else []
    shapes = [part.shape for part in parts if isinstance(part, (Tensor, np.ndarray))] if len(parts) <= 3 else []
    # samples have one number of dimensions
    if len(shapes) == len(parts) and len({*map(len, shapes)}) > 1 and len({shape[:1] for shape in shapes}) == 1:
        what = f"{kind_of(dataset)} of {len(parts)} tensors with {shapes[0][0]} rows each"
        raise Refusal(f"{method}() returned {what}: return TensorDataset(x, y) of them, whose samples are the rows")
    try:
        return len(dataset)
    except Exception as error:  # from the data set, or from Python: a length that is negative, a fraction or too large
        raise Refusal(
            f"{method}() returned {kind_of(dataset)} whose __len__ fails: {type(error).__name__}: {error}"
            f"{place_of(error.__traceback__)}; it must return the number of samples"
        ) from error

"""Batches of any structure: collated from samples, and moved to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..common.errors import EndedByData
from ..common.memory import is_out_of_memory
from ..common.naming import kind_of


def to_device(batch: Any, device: torch.device, copy_tensor: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Move all tensors of a batch: in mappings, lists, tuples and dataclasses, and what has a `to` of its own.

    `copy_tensor` replaces `Tensor.to` for tensors on the CPU.
    """
    if isinstance(batch, Tensor) and copy_tensor and batch.device.type == "cpu":
        return copy_tensor(batch)
    if callable(move := getattr(batch, "to", None)):  # a PackedSequence, for example, keeps its lengths on the host
        try:
            return move(device, non_blocking=True)
        except TypeError:
            return move(device)
    return with_parts(batch, lambda part: to_device(part, device, copy_tensor))


def with_parts(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the values of a mapping, list, tuple or dataclass and keep its type; all else is returned."""
    if isinstance(batch, Mapping):
        parts = {key: function(value) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return type(batch)(parts)  # type: ignore[call-arg]
        copied = copy.copy(batch)  # a mapping of another kind may hold more than its items
        copied.update(parts)
        return copied
    if isinstance(batch, (list, tuple)):
        return type(batch)(*map(function, batch)) if hasattr(batch, "_fields") else type(batch)(map(function, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, function(getattr(batch, field.name)))  # it may be frozen
        return changed
    return batch


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    found: list[Tensor] = []
    with_parts(batch, lambda part: found.extend(tensors_in(part)))
    return found


def collate(samples: Any) -> Any:
    """Collate a list of samples; a batch that the data set has collated itself is returned as it is."""
    if not isinstance(samples, list):
        return samples
    try:
        return default_collate(samples)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise Uncollated(explain_samples(samples, error)) from error


class Uncollated(EndedByData):
    """Samples that cannot be collated."""


def explain_samples(samples: Sequence[Any], error: BaseException) -> str:
    """Say in one line which part of the samples cannot be collated, and what to return instead."""
    trouble = _trouble(samples, "") or f"default_collate fails: {str(error).splitlines()[0]}"
    return f"the data set's samples cannot be made a batch: {trouble}"


def _trouble(values: Sequence[Any], path: str) -> str:
    """What is wrong with the values at one path of all samples; empty if they can be collated."""
    where = f"sample{path}" if path else "a sample"
    keys: Iterable[Any] | None = None
    if all(isinstance(value, Mapping) for value in values):
        keys = values[0].keys()
        for key in keys:
            if not all(key in value for value in values):
                return f"sample{path}[{key!r}] is not there in every sample; give all samples the same keys"
    elif all(isinstance(value, (list, tuple)) for value in values):
        fewest, most = min(map(len, values)), max(map(len, values))
        if fewest < most:
            return f"{where} has {fewest} parts in one sample and {most} in another; give all the same number"
        keys = range(most)
    if keys is not None:
        found = (_trouble([value[key] for value in values], f"{path}[{key!r}]") for key in keys)
        return next(filter(None, found), "")
    shapes = sorted({tuple(value.shape) for value in values if isinstance(value, (Tensor, np.ndarray))})
    if len(shapes) > 1:
        return (
            f"{where} has different sizes, {list(shapes[0])} and {list(shapes[-1])}: resize, crop or pad them to one, "
            "or give the data set a __getitems__ that returns a batch it has collated itself"
        )
    for value in values:
        if remedy := _remedy(value):
            return f"{where} is {kind_of(value)}: {remedy}"
    types = sorted({type(value).__name__ for value in values})
    return f"{where} is of different types: {', '.join(types)}; return one type for all" if len(types) > 1 else ""


def _remedy(value: Any) -> str:
    """What to return instead of a value that cannot be collated; empty if it can."""
    if value is None:
        return "return a number or a tensor that stands for nothing (-1, say), or leave that part out of all samples"
    if type(value).__module__.partition(".")[0] == "PIL":
        return "make it a tensor in the data set's transform, by torchvision.transforms.v2.ToImage() or PILToTensor()"
    if dataclasses.is_dataclass(value):
        return "return a dict, by dataclasses.asdict(sample), a tuple or a named tuple"
    try:
        default_collate([value])
    except Exception:
        return "return tensors, arrays, numbers, texts, or dicts, lists and tuples of them"
    return ""

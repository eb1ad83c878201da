"""Batches of any structure: collated from samples, and moved to a device."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..common.errors import Ended, EndedByData, Uncollated, place_of, seen_at
from ..common.memory import is_out_of_memory
from ..common.naming import kind_of


def to_device(batch: Any, device: torch.device, copy_tensor: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Move all tensors of a batch: in mappings, lists, tuples and dataclasses, and objects with their own `to`.

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
        copied = copy.copy(batch)  # a custom mapping may have more than its items
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


def described(batch: Any, nested: bool = False) -> str:
    """Such as "a list of [20, 2] float32, [20] int64"."""
    if isinstance(batch, Tensor):
        return f"{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if nested or not isinstance(batch, (Mapping, list, tuple)):
        return kind_of(batch)
    named = batch.items() if isinstance(batch, Mapping) else (("", part) for part in batch)
    parts = [f"{f'{name!r}: ' if name else ''}{described(part, nested=True)}" for name, part in named]
    more = f" and {len(parts) - 6} more" if len(parts) > 6 else ""
    return f"{kind_of(batch)} of {', '.join(parts[:6])}{more}"


def dense(tensor: Tensor) -> list[Tensor]:
    """A tensor as strided ones: itself, a sparse one made dense, or the parts of a nested one."""
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


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


def collated_by(own: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Collate with a task's own function; its errors are reported in a line with their place."""
    try:
        batch = own(samples)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, Ended):
            raise
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        kind = EndedByData if isinstance(error, OSError) else Uncollated
        raise kind(
            f"the task's collate() fails{place_of(error.__traceback__)}: {why}; it gets a list of {len(samples)} "
            "samples, as the data set returns them, and must return the batch"
        ) from error
    with seen_at(own):
        if batch is None:  # would be taken for an idle rank's
            raise Uncollated("the task's collate() returned None: return the batch")
    return batch


def explain_samples(samples: Sequence[Any], error: Exception) -> str:
    """Say in one line which part of the samples cannot be collated, why, and what to return instead."""
    path, parts, error = _culprit(samples, "", error)
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    if found := re.search(r"found <class '(.+)'>", why):
        none = "it is None" + (" (does __getitem__ return it?)" if not path else "")
        why = none if found[1] == "NoneType" else f"its type is {found[1]}"
    sizes = [list(part.shape) if hasattr(part, "shape") else None for part in parts]
    if any(sample is None for sample in samples):  # from `__getitems__`: of others the loader knows the index
        path, why = "", "it is None (does __getitem__ return it?)"
    elif None not in sizes and (other := next((n for n, size in enumerate(sizes) if size != sizes[0]), 0)):
        why = f"its sizes differ: {sizes[0]} at entry 0 and {sizes[other]} at entry {other}"
    return (
        f"the data set's samples cannot be collated: {f'part {path} of a sample' if path else 'a sample'}: {why}; "
        "return tensors, arrays, numbers, strings, or dicts, lists and tuples of them, all of one shape, or define "
        "collate(samples) in the task, as DataLoader's collate_fn"
    )


def _culprit(values: Sequence[Any], path: str, error: Exception) -> tuple[str, Sequence[Any], Exception]:
    """The innermost part that cannot be collated: its path, its value in each sample, and its error."""
    first = values[0]
    for key in first if isinstance(first, Mapping) else range(len(first)) if isinstance(first, (list, tuple)) else ():
        try:
            part = [value[key] for value in values]
        except (LookupError, TypeError):  # not every sample has it
            break
        try:
            default_collate(part)
        except Exception as inner:
            return _culprit(part, f"{path}[{key!r}]", inner)
    return path, values, error

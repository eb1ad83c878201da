"""What a task's `metrics` and `summarize` return, and its `best`: refused in a line where a run cannot go on with it.

Left alone, most of it shows after the first epoch, in words about stacking or JSON; some of it never.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .errors import Ended, EndedHere, Refusal
from .mistakes import kind_of

SHOWN = 'best = ("loss", "min")'


def check_best(best: Any, patience: int) -> None:
    """Whether a task says which metric counts, and how; None: none does.

    Raises:
        Refusal: it says something else, or nothing where --patience needs it.
    """
    if best is None:
        if patience:
            raise Refusal(
                f"--patience {patience}: the task's `best` is None; name the metric that counts, {SHOWN} for example, "
                "or leave --patience out"
            )
        return
    pair = tuple(best) if isinstance(best, (tuple, list)) else ()
    if len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in ("max", "min"):
        raise Refusal(
            f'the task\'s `best` is {best!r}: it must be a metric\'s name and "max" or "min", {SHOWN} for example, or '
            "None to keep no best checkpoint"
        )


def check_metrics(metrics: Any, samples: int, known: Mapping[str, Sequence[Tensor]]) -> None:
    """Whether metrics have a row for each sample; a mean over the batch would count as one sample's.

    Args:
        metrics: what a task returned for a batch.
        samples: in the batch.
        known: sums over samples of the batches before, by name; empty for the first one.

    Raises:
        EndedHere: they have not, or they are not those of the other batches.
    """
    if not isinstance(metrics, Mapping):
        raise EndedHere(f"metrics() returned {kind_of(metrics)}: it must return a dict of tensors")
    for name, values in metrics.items():
        if not isinstance(name, str):
            raise EndedHere(f"metrics() returned a dict with the key {name!r}: names of metrics must be texts")
        what = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else kind_of(values)
        if not isinstance(values, Tensor) or values.shape[:1] != (samples,):
            raise EndedHere(
                f"metrics() returned {what} as '{name}' for a batch of {samples} samples: it must have a row for each "
                f"sample, [{samples}, ...], and not their mean, or the last, smaller batch would count too much"
            )
        if values.is_complex():
            raise EndedHere(f"metrics() returned complex numbers as '{name}': return real ones, by .abs() or .real")
    if known:
        shapes = {name: sums[0].shape for name, sums in known.items()}
        check_alike(shapes, {name: values.shape[1:] for name, values in metrics.items()})


def check_alike(known: Mapping[str, torch.Size], others: Mapping[str, torch.Size]) -> None:
    """Whether batches have the same metrics, by name with the shape that a sample's row has.

    Raises:
        EndedHere: they have not, so that there is no mean of them.
    """
    if others.keys() != known.keys():
        other = ", ".join(sorted(others.keys() ^ known.keys()))
        raise EndedHere(
            f"metrics() returned other names for one batch than for another ({other}): it must return the same"
        )
    for name, shape in known.items():
        if others[name] != shape:
            raise EndedHere(
                f"metrics() returned rows of shape {list(shape)} as '{name}' for one batch and of {list(others[name])} "
                "for another: give all samples rows of one shape, padded or summed up"
            )


def checked_summary(summary: Any) -> dict[str, float]:
    """What `summarize` returned, in plain numbers: a file of JSON or a checkpoint holds no others.

    Raises:
        Ended: these are no numbers, or not by name.
    """
    if not isinstance(summary, Mapping):
        raise Ended(f"summarize() returned {kind_of(summary)}: it must return a dict of numbers")
    numbers = {name: _item(value) for name, value in summary.items()}
    for name, number in numbers.items():
        if not isinstance(name, str):
            raise Ended(f"summarize() returned a dict with the key {name!r}: names of metrics must be texts")
        if not isinstance(number, Real):
            what = f"a tensor of shape {list(number.shape)}" if isinstance(number, Tensor) else kind_of(number)
            raise Ended(f"summarize() returned {what} as '{name}': it must be one real number")
    return {name: number if type(number) is int else float(number) for name, number in numbers.items()}


def _item(value: Any) -> Any:
    """The number in a tensor or an array of one; anything else is itself."""
    return value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value


def one_number(name: str, mean: Tensor) -> float:
    """The mean of a metric that has one number for each sample.

    Raises:
        Ended: it has several, and only the task knows what they are.
    """
    if mean.numel() == 1:
        return float(mean)
    raise Ended(
        f"metrics() returned '{name}' with {mean.numel()} numbers, {list(mean.shape)}, for each sample: return one for "
        "each sample, or override summarize(means) to make numbers of their means"
    )

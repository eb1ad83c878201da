"""Warns of a loss or a metric that is the sum over a batch: steps and evaluations weigh the means of their batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..common.naming import listed
from ..data.batch import tensors_in
from ..data.randomness import generators_kept
from ..distributed.data_parallel import rows_of
from .compilation import uncompiled
from .evaluation import evaluating, same_tensors

log = logging.getLogger(__name__)
isclose = partial(math.isclose, rel_tol=0.01)


def warn_of_sums(method: str, compute: Callable[..., Any], samples: int, model: nn.Module, batch: Any) -> None:
    """Warn of numbers of `compute(model, batch)` that grow in proportion when a few of the samples are repeated.

    The numbers of a loss that compares samples do not. Nothing is said if the batch cannot be cut, or if `compute`
    fails. Generators, buffers and modes are restored.
    """
    few = list(range(min(16, samples // 3)))
    if not few or any(it.is_nested or (it.dim() and len(it) != samples) for it in tensors_in(batch)):
        return
    with generators_kept(), same_tensors(model), evaluating(model), uncompiled(), torch.no_grad():
        try:
            one, two, three = (_numbers(compute(model, rows_of(batch, few * times, samples))) for times in (1, 2, 3))
            grow = [it for it in one if one[it] and isclose(2 * one[it], two[it]) and isclose(3 * one[it], three[it])]
        except Exception:
            return
    if grow:
        log.warning(
            "%s returns the sum over the batch's samples (%s), but batches are weighed as means, so it depends on "
            "--batch-size and --micro-batch: return the mean, by .mean() or reduction='mean'", method, listed(grow),
        )  # fmt: skip


def _numbers(found: Any) -> dict[str, float]:
    """The scalars in the result of `loss()` or `metrics()`, by name."""
    loss, parts = found if isinstance(found, tuple) else (found, {})
    named = loss if isinstance(loss, dict) else {"loss": loss, **parts}
    return {name: float(it) for name, it in named.items() if isinstance(it, Tensor) and it.dim() == 0}

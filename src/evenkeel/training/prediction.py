"""A task's predictions for all samples of a set, in order, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.errors import Ended, seen_at
from ..common.naming import kind_of
from ..common.phases import EVALUATION, activity
from .evaluation import Evaluation

SUM_ERROR = 0.05
"""How far from 1 a sum of probabilities may be: those of bfloat16 have two digits."""


def predictions(evaluation: Evaluation, top: int = 1) -> dict[str, Tensor]:
    """The results of the task's `predict`, on the CPU of every rank; row i is that of sample i.

    "probabilities", [samples, classes], is replaced by the `top` most likely classes, "prediction", and their
    probabilities, "confidence", both [samples, top]. Each rank computes its own micro-batches; none is computed twice.

    Raises:
        Ended: on all ranks, if a sample of any rank cannot be read or `predict` returns another type or shape.
    """
    parts: list[dict[str, Tensor]] = []
    mine: dict[str, Tensor] | Ended

    def take(returned: Any, samples: int) -> None:
        with seen_at(evaluation.task.predict):
            parts.append(rows_of(returned, samples, top))

    try:
        with activity.during(EVALUATION):
            evaluation.for_each_batch(lambda batch: evaluation.task.predict(evaluation.model, batch), take)
        mine = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    except Ended as ended:  # the others would wait for this rank
        if evaluation.divided:  # in a forward pass: it sees that this rank has ended
            raise
        mine = Ended(str(ended))
    by_rank = evaluation.world.all_gather(mine)
    for of_rank in by_rank:
        if isinstance(of_rank, Ended):
            raise of_rank
    found: list[dict[str, Tensor]] = [of_rank for of_rank in by_rank if isinstance(of_rank, dict) and of_rank]
    return {name: torch.cat([of_rank[name] for of_rank in found]) for name in found[0]}


def rows_of(returned: Any, samples: int, top: int = 1) -> dict[str, Tensor]:
    """The result of a task's `predict`, on the CPU, if it has a row for each sample; raises `Ended` otherwise."""
    if not isinstance(returned, dict) or not returned:
        raise Ended(f"predict() returned {kind_of(returned)}: it must return a dict of tensors")
    for name, values in returned.items():
        if not isinstance(values, Tensor) or values.dim() not in (1, 2) or len(values) != samples:
            shape = list(values.shape) if isinstance(values, Tensor) else kind_of(values)
            raise Ended(
                f"predict() returned {shape} as '{name}' for a batch of {samples} samples: it must be a tensor of "
                f"shape [{samples}] or [{samples}, numbers]"
            )
    rows: dict[str, Tensor] = dict(returned)
    if "probabilities" in rows:
        probabilities = rows.pop("probabilities")
        if probabilities.dim() != 2 or ((probabilities.sum(1) - 1).abs() > SUM_ERROR).any():
            raise Ended(
                "predict() returned 'probabilities' that do not add up to 1 in each row: they must be of classes of "
                "which a sample has one; give other numbers another name, such as 'scores'"
            )
        confidence, prediction = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
        rows = {"prediction": prediction, "confidence": confidence, **rows}
    return {name: values.detach().cpu() for name, values in rows.items()}

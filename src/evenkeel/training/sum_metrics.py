"""Metric objects of torchmetrics in an evaluation: those whose state is a sum over samples.

Their own exchange between ranks is not used. Their sums for a micro-batch are returned as metrics of the task, and
added to those of all other micro-batches: each sample once, and in one order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.errors import EndedHere, Refusal
from ..common.naming import kind_of


class SumMetrics:
    """torchmetrics' objects by name, for `metrics` and `summarize` of a task; a MetricCollection as ``**collection``.

    They are reset for each micro-batch.

    >>> own = SumMetrics(error=MeanSquaredError())
    >>> means = {name: rows.mean(0) for name, rows in own.of(torch.ones(4), torch.zeros(4)).items()}
    >>> own.computed(means, samples=4)
    {'error': tensor(1.)}

    Raises:
        Refusal: a metric has a state that is not a sum, or is made of other metrics.
    """

    def __init__(self, **metrics: Any) -> None:
        self.metrics = metrics
        for name, metric in metrics.items():
            _check(name, metric)

    def of(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        """The sums of each metric for n samples, by NAME.STATE: n equal rows, [n, ...], that add up to the sum.

        The arguments are those of `update`; the first has the length n.
        """
        first = next(iter((*inputs, *named.values())))
        rows = {}
        for name, metric in self.metrics.items():
            metric.to(getattr(first, "device", "cpu")).reset()
            metric.update(*inputs, **named)
            for state, start in metric._defaults.items():
                added = getattr(metric, state) - start
                if added.is_floating_point() and not start.is_floating_point():
                    raise EndedHere(f"{name}: adds fractions to its integer state '{state}': initialise that to 0.0")
                rows[f"{name}.{state}"] = added.double().div(len(first)).expand(len(first), *added.shape)
        return rows

    def computed(self, means: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
        """The means over all samples, with the result of each metric instead of its states.

        ``samples``: their number; `summarize` gets it if it has a parameter of this name.
        """
        means = dict(means)
        for name, metric in self.metrics.items():
            metric.cpu().reset()
            for state, start in metric._defaults.items():
                total = means.pop(f"{name}.{state}").cpu() * samples
                # counts are exact again
                setattr(metric, state, start + (total if start.is_floating_point() else total.round()).to(start.dtype))
            metric._update_count, metric._to_sync = 1, False  # all ranks are in these sums already
            means[name] = metric.compute()
        return means


def _check(name: str, metric: Any) -> None:
    """Refuse an object that is not a single metric with states, or has a state that is not combined by a sum."""
    if not getattr(metric, "_defaults", None) or sum(hasattr(part, "_defaults") for part in metric.modules()) > 1:
        raise Refusal(
            f"{name}: SumMetrics takes single metrics of torchmetrics, not {kind_of(metric)}; name each of them"
        )
    for state, start in metric._defaults.items():
        how = getattr(metric._reductions[state], "__name__", "none").removeprefix("dim_zero_")
        if how != "sum" or not isinstance(start, Tensor):
            raise Refusal(
                f"{name}: the state '{state}' of {kind_of(metric)} is combined by {how}, not by sum; choose options "
                "that make it count or add only (for example thresholds=200), or return rows for it from metrics()"
            )

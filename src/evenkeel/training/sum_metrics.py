"""Metric objects of torchmetrics in an evaluation: those whose state is a sum over samples.

Their own exchange among ranks is not used. What they add up for a micro-batch leaves them as one of the task's metrics,
and is added up with those of all others: each sample once, and in one order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common.errors import EndedHere, Refusal
from ..common.naming import kind_of


class SumMetrics:
    """torchmetrics' objects by name, for `metrics` and `summarize` of a task; a MetricCollection as ``**collection``.

    Nothing stays in them from one micro-batch to the next.

    >>> own = SumMetrics(error=MeanSquaredError())
    >>> means = {name: rows.mean(0) for name, rows in own.of(torch.ones(4), torch.zeros(4)).items()}
    >>> own.computed(means, samples=4)
    {'error': tensor(1.)}

    Raises:
        Refusal: a metric has a state that is no sum, or is made of other metrics.
    """

    def __init__(self, **metrics: Any) -> None:
        self.metrics = metrics
        for name, metric in metrics.items():
            _check(name, metric)

    def of(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        """What each metric adds up for n samples, by NAME.STATE: n equal rows, [n, ...], that have this sum.

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
                    raise EndedHere(f"{name}: adds fractions to its state '{state}', an integer: let that begin as 0.0")
                rows[f"{name}.{state}"] = added.double().div(len(first)).expand(len(first), *added.shape)
        return rows

    def computed(self, means: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
        """The means over all samples, with what each metric computes in place of its states.

        ``samples``: how many there are; `summarize` is told if it has a parameter of this name.
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
    """Refuse what is no metric with states of its own, or has one that is not joined by adding."""
    if not getattr(metric, "_defaults", None) or sum(hasattr(part, "_defaults") for part in metric.modules()) > 1:
        raise Refusal(
            f"{name}: SumMetrics takes single metrics of torchmetrics, not {kind_of(metric)}; name each of them"
        )
    for state, start in metric._defaults.items():
        how = getattr(metric._reductions[state], "__name__", "none").removeprefix("dim_zero_")
        if how != "sum" or not isinstance(start, Tensor):
            raise Refusal(
                f"{name}: the state '{state}' of {kind_of(metric)} is joined by {how}, not by sum; choose options with "
                "which it only counts or adds (thresholds=200, for example), or return rows for it from metrics()"
            )

"""When a run is over: after its last step, or after several evaluations without an improvement.

Its memory is part of the committed state, so a run that is killed and resumed ends at the same step as an
undisturbed one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from math import isnan
from typing import Any, Literal, NamedTuple

from ..common.errors import Ended
from ..common.naming import TEST, in_set

log = logging.getLogger(__name__)

ONLY_LOSS: tuple[str, Literal["max", "min"]] = ("loss", "min")
"""What decides which checkpoint is the best, where there is no accuracy and the task says nothing else."""


class History(NamedTuple):
    """The evaluations so far. Replaced as a whole, because another thread may save it at any time."""

    evaluated: int = 0  # step of the last one
    best: float | None = None
    stale: int = 0  # evaluations since the best one


class Stopping:
    """Says when to evaluate and when to stop.

    Args:
        last_step: of the plan.
        every: steps between two evaluations.
        best: the metric that counts, with "max" or "min".
        patience: evaluations without an improvement after which the run is over; 0: no limit.
        decides: the set whose metric counts.
        assumed: `best` is the default, in whose place the loss counts if there is no such metric.
    """

    def __init__(
        self,
        last_step: int = sys.maxsize,
        every: int = sys.maxsize,
        best: tuple[str, str] | None = ("accuracy", "max"),
        patience: int = 0,
        decides: str = TEST,
        assumed: bool = False,
    ) -> None:
        self.last_step, self.every, self.best, self.patience = last_step, every, best, patience
        self.decides, self.assumed = decides, assumed and best is not None
        self.history = History()

    @property
    def best_by(self) -> tuple[str, str] | None:
        """The metric that counts, by its full name."""
        return (in_set(self.decides, self.best[0]), self.best[1]) if self.best else None

    def resume_from(self, before: tuple[str, str] | None) -> str:
        """Resume from a checkpoint with this `best_by`. Returns a line if another metric decides now, "" if not."""
        if self.assumed and before == (in_set(self.decides, ONLY_LOSS[0]), ONLY_LOSS[1]):
            self.best = ONLY_LOSS  # as `check` has found at its start
        now = self.best_by
        if not (before and now) or before == now:
            return ""
        self.history = History()
        return f"{now[0]} decides which checkpoint is the best, where {before[0]} did"

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        return step == self.last_step or step % self.every == 0

    def owed(self, step: int) -> bool:
        """Whether a run that resumes at this step must evaluate first: it is over, or it was killed before an
        evaluation that counts."""
        missed = bool(self.patience) and 0 < step != self.history.evaluated and self.due(step)
        return missed or self.over(step)

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record an evaluation on the set that decides; empty metrics mean that there was none."""
        if not (metrics and self.patience) or step == self.history.evaluated or step % self.every:
            return  # an extra evaluation after the last step must not count if the run is extended later
        self.check(metrics)
        assert self.best  # --patience without it was refused
        name, mode = self.best
        value, best = metrics[name], self.history.best
        better = not isnan(value) and (best is None or (value > best if mode == "max" else value < best))
        self.history = History(step, value, 0) if better else History(step, best, self.history.stale + 1)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Warn if an evaluation lacks the metric that counts; end the run if --patience needs it."""
        if self.assumed and self.best and self.best[0] not in metrics and "loss" in metrics:
            self.best = ONLY_LOSS
        if not self.best or self.best[0] in metrics:
            return
        text = f"the evaluation has no metric {self.best[0]!r}, only {', '.join(metrics) or 'none at all'}"
        if self.patience:
            raise Ended(f"--patience {self.patience}: {text}; set the task's `best`, or leave --patience out")
        name = next(iter(metrics), "loss")
        modes = '"min"' if "loss" in name else '"max" or "min"'
        log.warning(
            'no best checkpoint is stored: %s; in the task, write best = ("%s", %s), or None', text, name, modes
        )

    def over(self, step: int) -> bool:
        """Whether this step is the last."""
        return step >= self.last_step or self.early

    @property
    def early(self) -> bool:
        """Whether patience has run out."""
        return bool(self.patience) and self.history.stale >= self.patience

    def why(self) -> str:
        """The reason for stopping early, in a line; called for every run that ends."""
        best = "any number" if self.history.best is None else f"{self.history.best:.4f}"
        name = self.best_by[0] if self.best_by else "metric"
        return f"no better {name} than {best} in {self.history.stale} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return self.history._asdict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self.history = History(**saved)

"""When a run is over: after its last step, or after some evaluations that were no better than one before.

What it remembers is part of the committed state. So a run that was killed between a step and the evaluation that was
due there evaluates first when it comes back, and ends where it would have ended.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isnan
from typing import Any

from .errors import Ended
from .naming import TEST, full_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """What has come of the evaluations so far. Replaced as a whole, because another thread may save it at any time."""

    evaluated: int = 0
    """Step of the last evaluation."""
    best: float | None = None
    stale: int = 0
    """Evaluations since the best one."""


class Stopping:
    """Says when to evaluate and when to end.

    Args:
        last_step: of the plan.
        every: steps between two evaluations.
        best: (metric, "max" or "min") that counts; None: none does.
        patience: evaluations without an improvement after which the run is over; 0: it never is before its last step.
    """

    def __init__(
        self,
        last_step: int = sys.maxsize,
        every: int = sys.maxsize,
        best: tuple[str, str] | None = ("accuracy", "max"),
        patience: int = 0,
    ) -> None:
        self.last_step, self.every, self.best, self.patience = last_step, every, best, patience
        self.memory = Memory()

    def due(self, step: int) -> bool:
        """Whether the state after this step is to be evaluated."""
        return step == self.last_step or step % self.every == 0

    def owed(self, step: int) -> bool:
        """Whether a run that comes back at this step must evaluate first: for its end, or because it was killed before
        an evaluation that counts."""
        missed = bool(self.patience) and 0 < step != self.memory.evaluated and self.due(step)
        return missed or self.over(step)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in an evaluation; without metrics there was none.

        Raises:
            Ended: the metric that counts is not among them.
        """
        if not (metrics and self.patience) or step == self.memory.evaluated or step % self.every:
            return  # the last step's is no part of the rhythm: a run that is prolonged must not remember it
        self.check(metrics)
        assert self.best  # or --patience is refused
        name, mode = self.best
        value, best = metrics[name], self.memory.best
        better = not isnan(value) and (best is None or (value > best if mode == "max" else value < best))
        self.memory = Memory(step, value, 0) if better else Memory(step, best, self.memory.stale + 1)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Warn if the metric that counts is not among those of an evaluation.

        Raises:
            Ended: it is not, and --patience needs it.
        """
        if not self.best or self.best[0] in metrics:
            return
        text = f"the evaluation has no metric {self.best[0]!r}, only {', '.join(metrics) or 'none at all'}"
        if self.patience:
            raise Ended(f"--patience {self.patience}: {text}; set the task's `best`, or leave --patience out")
        example = next(iter(metrics), "loss")
        log.warning(
            "no best checkpoint will be kept: %s; set the task's `best`, to (%r, 'min') say, or None", text, example
        )

    def over(self, step: int) -> bool:
        """Whether there are no more steps after this one."""
        return step >= self.last_step or self.early

    @property
    def early(self) -> bool:
        """Whether patience is at its end."""
        return bool(self.patience) and self.memory.stale >= self.patience

    def why(self) -> str:
        """Why the run is over before its last step, in a line."""
        best = "any number" if self.memory.best is None else f"{self.memory.best:.4f}"
        name = full_name(TEST, self.best[0]) if self.best else "metric"
        return f"no better {name} than {best} in {self.memory.stale} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self.memory)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Become what :meth:`state_dict` gave."""
        self.memory = Memory(**saved)

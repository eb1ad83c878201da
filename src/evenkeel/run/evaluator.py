"""Evaluations of the present state: on the set that decides which checkpoint is best, and on the others."""

from __future__ import annotations

from functools import partial

from ..common.naming import VALIDATION
from ..data.data_digest import TRAINING
from ..training.evaluation import Evaluation
from ..training.prediction import predictions
from ..training.side_effects import warn_of_sums
from ..training.state import State
from ..training.task import Task, defines
from ..training.whole_batch_evaluation import evaluation_of
from . import media
from .attempt import Attempt
from .predictions import save_predictions
from .records import TAIL, evaluation_in, read_records


class Evaluator:
    """Computes a task's metrics with the state's best model, on all ranks, and stores them.

    Of the attempt's sets the first that is not the training data decides.
    """

    def __init__(self, attempt: Attempt, task: Task, state: State) -> None:
        self._attempt, self._task, self._state = attempt, task, state
        self._evaluations: list[Evaluation] = []
        self._recorded: tuple[int, dict[str, float]] = 0, {}  # by an earlier attempt: the step, and its metrics
        self._checked = False  # whether metrics of this attempt have shown if they have the one that decides
        self.metrics: dict[str, float] = {}
        """Of the present step, by full names; empty if it was not evaluated."""

    def prepare(self) -> None:
        """Prepare the sets, and rehearse before the first step, so that an error in metrics does not come only after an
        epoch or at the end."""
        attempt, config = self._attempt, self._attempt.config
        self._evaluations = [
            evaluation_of(self._task, self._state.best_model, dataset, config, attempt.world, name)
            for name, dataset in attempt.sets.items()
            if name != TRAINING
        ]
        if not self._evaluations:
            return
        self._evaluations[0].shows = defines(type(self._task), "show")
        if step := self._state.step:
            records = list(read_records(attempt.path / "metrics.jsonl", TAIL)) if attempt.lead else []
            self._recorded = step, attempt.world.broadcast(evaluation_in(records, step))
        else:
            compute, first = [self._task.predict] if config.save_predictions else [], self._evaluations[0]
            own = defines(type(self._task), "metrics") and not (first.divided or self._task.collectives)
            size = first.sampler.micro_batches(0)[0].size if attempt.lead and own else 0
            warn = partial(warn_of_sums, "metrics", self._task, attempt.world.device, size)
            rehearsed, *_ = [it.rehearse(*compute, *[warn] * (it is first and size > 0)) for it in self._evaluations]
            media.check(first.shown)
            if rehearsed is not None:
                self._check(rehearsed)
                if schedulers := self._state.schedulers:
                    schedulers.check(rehearsed)

    def owed(self, unevaluated: bool) -> bool:
        """Whether a run that resumes at this step must evaluate before it goes on: it is over, early stopping or a
        scheduler lacks the metrics, or the checkpoint does (`unevaluated`), as one of a rescue."""
        state, step = self._state, self._state.step
        of_schedulers = state.schedulers is not None and state.schedulers.owed(step)
        return state.stopping.owed(step) or of_schedulers or (unevaluated and state.evaluation_is_due())

    def _check(self, metrics: dict[str, float]) -> None:
        """Warn of the first evaluation if it lacks the metric that decides; find out whether the loss does."""
        if self._checked:
            return
        self._checked = True
        self._state.stopping.check(metrics)
        self._attempt.provenance.best_by = self._state.stopping.best_by

    def evaluate(self) -> None:
        """Evaluate on the set that decides and then, now or at the end only, on the others. Without a set there are no
        metrics. What was recorded of this step before a kill is not done again."""
        if not self._evaluations:
            self.metrics = self._state.record_evaluation({})
            return
        first, *others = self._evaluations
        step, known = self._recorded
        usable = all(isinstance(value, int | float) for value in known.values())  # what is not is None in a record
        usable &= any(name.startswith(f"{first.name}/") for name in known)  # else the run had other sets then
        if usable and step == self._state.step and not self._state.is_over():
            own = {n.removeprefix(f"{first.name}/"): v for n, v in known.items()}
            self._check(self._state.record_evaluation(own | known))
            self.metrics = known
            return
        metrics = self._state.record_evaluation(first())
        self._check(metrics)
        self.metrics = first.named(metrics)
        if first.name != VALIDATION or self._state.is_over():
            for other in others:
                self.metrics |= other.named(other())
        if self._attempt.lead:
            media.log(self._attempt.lead.tracker, self._state.step, first.shown)
        self._task.after_evaluation(dict(self.metrics), self._state.step)

    def save_predictions(self) -> None:
        """For --save-predictions, after the last evaluation. Rank 0 writes."""
        for evaluation in self._evaluations:
            rows = predictions(evaluation)
            if self._attempt.lead:
                save_predictions(self._attempt.path / "predictions", self._state.step, evaluation, rows)

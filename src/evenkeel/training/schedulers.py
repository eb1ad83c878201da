"""torch's learning rate schedulers, as a part of the committed state.

The device decides whether a step counts, and the host learns of it while the next step is computed
(`State.commit`). So the device counts the steps taken, and the host the steps that its schedulers know of. A copy of
the state has both numbers; loading it steps the schedulers as often as they differ, which is at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR, ReduceLROnPlateau

from ..common.errors import Ended, EndedForGood, Refusal
from ..common.naming import kind_of, listed
from ..config import Config
from .nonfinite import Verdict

Scheduler: TypeAlias = LRScheduler | tuple[LRScheduler, Literal["step", "evaluation"]]
"""A task returns these: a scheduler, perhaps with the event after which it is stepped."""

CODE = (FunctionType, BuiltinFunctionType, MethodType, partial, type)
"""Attributes of a scheduler that are not state: the task creates them again."""


class Made(NamedTuple):
    """One of a task's schedulers."""

    name: str  # for messages: "schedulers()[0], a OneCycleLR"
    scheduler: Any  # an LRScheduler; the arguments of `step` differ
    by_evaluation: bool  # stepped after each evaluation, instead of each optimizer step


class Schedulers:
    """Steps a task's schedulers, and has their state.

    Args:
        made: as :func:`checked_schedulers` returns them.
        best: the metric that decides, with "max" or "min", for schedulers that need one.
        last_step: of the run; the rates of schedulers depend on it.
        every: steps between two evaluations.
    """

    def __init__(self, made: Sequence[Made], best: tuple[str, str] | None, last_step: int, every: int) -> None:
        self.made, self.best, self.every = made, best, every
        self.taken = torch.zeros((), dtype=torch.int64)
        """Steps that were not skipped, counted on the device; `State` moves it there."""
        self.known = 0
        """The number of these steps that the schedulers know of."""
        self.evaluated = 0
        """The step of the last evaluation that the schedulers know of."""
        self.broken = False
        """Whether one has failed in the middle of a step, so that their state is that of half a step."""
        self.pending = False
        """Whether there is a step that the schedulers do not know of yet."""
        self._evaluates = any(each.by_evaluation for each in made)
        # the rates also depend on these; if one differed, it would be another run
        self._fixed = {
            "kinds": [type(each.scheduler).__name__ for each in made],
            "last_step": 0 if all(each.by_evaluation for each in made) else last_step,
            "every": every if self._evaluates else 0,
        }
        self._left_out: Verdict | None = None
        self._clean()

    @property
    def options(self) -> frozenset[str]:
        """The options on which the rates depend."""
        length = {"epochs", "max_steps"} if self._fixed["last_step"] else set[str]()
        return frozenset(length | ({"eval_every"} if self._evaluates else set()))

    def commit(self, skip: Tensor) -> None:
        """Count a step, unless ``skip``, a boolean scalar on the device of :attr:`taken`, is true."""
        self.taken += ~skip
        self._left_out = self._left_out or Verdict(self.taken.device)
        self._left_out.ask(skip)
        self.pending = True

    def step_if_taken(self) -> None:
        """Step the schedulers if the last step was taken. The host waits for the device."""
        assert self._left_out
        self.pending = False
        if not self._left_out.pop():
            self._step()

    def _step(self) -> None:
        self.known += 1
        for each in self.made:
            if not each.by_evaluation:
                self._take(each)

    def owed(self, step: int) -> bool:
        """Whether they must be stepped by an evaluation after this step, and have not been."""
        return self._evaluates and 0 < step != self.evaluated and step % self.every == 0

    def record_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step the schedulers after an evaluation. An extra evaluation after the last step does not count."""
        if not self.owed(step):
            return
        self.check(metrics)
        self.evaluated = step
        for each in self.made:
            if each.by_evaluation:
                plateau = isinstance(each.scheduler, ReduceLROnPlateau)
                self._take(each, *([metrics[self.best[0]]] if plateau and self.best else []))

    def check(self, metrics: Mapping[str, float]) -> None:
        """End the run if an evaluation lacks the metric that a scheduler needs."""
        name = self.best[0] if self.best else ""
        for each in self.made:
            if isinstance(each.scheduler, ReduceLROnPlateau) and name not in metrics:
                raise Ended(
                    f"{each.name}, needs the metric {name!r}, and the evaluation has only "
                    f"{', '.join(metrics) or 'none at all'}; set the task's `best`"
                )

    def _take(self, each: Made, *metric: float) -> None:
        try:
            each.scheduler.step(*metric)
            plain(each.scheduler.state_dict(), each.name)  # otherwise the run could no longer be saved
        except Exception as error:
            self.broken = True
            raise Ended(f"{each.name}, fails in step(): {type(error).__name__}: {error}") from error
        self._clean()

    def _clean(self) -> None:
        """Turn NumPy's numbers into plain ones, which a checkpoint can store: a LambdaLR's function may return them."""
        for each in self.made:
            for group in each.scheduler.optimizer.param_groups:
                group |= {name: plain(group[name], each.name) for name in ("lr", "momentum", "betas") if name in group}

    def state_dict(self) -> dict[str, Any]:
        """Plain data, and one tensor."""
        states = [plain(each.scheduler.state_dict(), each.name) for each in self.made]
        return {
            "taken": self.taken, "known": self.known, "evaluated": self.evaluated, "states": states, **self._fixed
        }  # fmt: skip

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, after the optimizers.

        Raises:
            EndedForGood: it has other schedulers, or the run has another length or evaluates at other steps.
        """
        told = {"kinds": "schedulers", "last_step": "length (--epochs, --max-steps)", "every": "--eval-every"}
        for fact, now in self._fixed.items():
            if (then := saved[fact]) != now:
                raise EndedForGood(
                    f"the run's {told[fact]} was {_said(then)} and is {_said(now)} now: the schedulers would set other "
                    "learning rates; restore it, or start over with --fresh"
                )
        for each, state in zip(self.made, saved["states"], strict=True):
            each.scheduler.load_state_dict(plain(state, each.name))  # a copy, because some of torch's change it
            _count_milestones(each.scheduler)
        self.taken.fill_(int(saved["taken"]))
        self.known, self.evaluated = saved["known"], saved["evaluated"]
        while self.known < int(saved["taken"]):
            self._step()


def load_schedulers(schedulers: Schedulers | None, saved: Mapping[str, Any] | None) -> None:
    """Load their part of a checkpoint; raises EndedForGood if only one of the two has any."""
    if (schedulers is None) != (saved is None):
        has, lacks = ("checkpoint", "task") if saved else ("task", "checkpoint")
        raise EndedForGood(
            f"the {has} has schedulers and the {lacks} has none: the learning rates cannot continue; restore "
            "the task's schedulers(), or start over with --fresh"
        )
    if schedulers and saved:
        schedulers.load_state_dict(saved)


def checked_schedulers(
    returned: Any,
    optimizers: Sequence[Optimizer],
    config: Config,
    last_step: int,
    best: tuple[str, str] | None,
    own_rates: bool,
) -> list[Made]:
    """The result of a task's `schedulers()`, as a list.

    Args:
        returned: a scheduler, or a list of them and of pairs (scheduler, "step" or "evaluation").
        optimizers: of the task.
        config: the options.
        last_step: of the run.
        best: the metric that decides, with "max" or "min".
        own_rates: the task defines `rates()` too.

    Raises:
        Refusal: they cannot be stepped or saved, or something else sets the learning rates too.
    """
    made = []
    for number, item in enumerate(returned if isinstance(returned, (list, tuple)) else [returned]):
        scheduler, when = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        name = f"schedulers()[{number}], {kind_of(scheduler)}"
        if not isinstance(scheduler, LRScheduler):
            raise Refusal(f"{name}: it must be a torch.optim.lr_scheduler.LRScheduler")
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        if when not in (None, "step", "evaluation") or (plateau and when == "step"):
            can = '"evaluation"' if plateau else '"step" (the default) or "evaluation"'
            raise Refusal(f"{name}, is paired with {when!r}: it can be {can}")
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise Refusal(f"{name}, has its own optimizer: build it from the `optimizers` that the method gets")
        made.append(Made(name, scheduler, plateau or when == "evaluation"))
        _check_fit(made[-1], best, last_step)
        plain(scheduler.state_dict(), name)
    if made and own_rates:
        raise Refusal("the task has both rates() and schedulers(), and each would set the learning rates: keep one")
    if made and (config.warmup_steps or config.schedule not in ("cosine", "constant")):
        typed = f"--warmup-steps {config.warmup_steps}" if config.warmup_steps else f"--schedule {config.schedule}"
        raise Refusal(f"{typed}: the task's schedulers() set the learning rates; leave it out")
    return made


def _check_fit(made: Made, best: tuple[str, str] | None, last_step: int) -> None:
    """Raise Refusal for a scheduler that needs another metric than the run has, or fewer steps."""
    name, scheduler = made.name, made.scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        if best is None:
            raise Refusal(
                f"{name}, needs a metric, and the task has no test data, or no `best` that names it: add both"
            )
        if (mode := getattr(scheduler, "mode", "")) != best[1]:
            why = f"`best` is {best[0]!r}, whose {best[1]} counts"
            raise Refusal(f"{name}, has mode={mode!r}, and {why}: make them the same, because it gets that metric")
    if isinstance(scheduler, OneCycleLR) and not made.by_evaluation and scheduler.total_steps < last_step:
        raise Refusal(
            f"{name}, has total_steps={scheduler.total_steps}, and the run has {last_step} steps: use "
            "config.max_steps, which is that number in schedulers()"
        )


def plain(value: Any, name: str, where: str = "", drop: tuple[type, ...] = CODE) -> Any:
    """A copy of a state without values of the types in ``drop``, in types that load with ``weights_only=True``.

    Raises:
        Refusal: the value at ``where`` has another type, so it could not be saved. ``name`` is the owner.
    """
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not isinstance(each, drop)}
        return {plain(key, name, where): plain(each, name, str(key), drop) for key, each in kept.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(each, name, where, drop) for each in value)
    raise Refusal(
        f"{name}, has {kind_of(value)} as {where!r}, which cannot be loaded from a checkpoint: use numbers, strings, "
        "tensors, lists and dicts, or leave it out of its state_dict()"
    )


def _count_milestones(scheduler: Any) -> None:
    """Turn the milestones, saved as a plain dict, into a Counter again."""
    if isinstance(scheduler, MultiStepLR):
        scheduler.milestones = Counter(scheduler.milestones)
    for part in getattr(scheduler, "_schedulers", ()):
        _count_milestones(part)


def _said(fact: Any) -> str:
    return listed(fact) if isinstance(fact, list) else str(fact)

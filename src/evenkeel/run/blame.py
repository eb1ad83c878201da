"""Which samples a failed step had: looked up only when it has failed."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..common.display import near
from ..common.errors import Ended
from ..data.batch import collate, described, tensors_in
from ..data.data_digest import TRAINING
from ..data.dataset import inner_index
from ..data.streams import stream_of
from ..distributed.causes import is_mistake
from ..training.nonfinite import NonFinite
from .attempt import Attempt
from .chain import samples_of, whole_steps

if TYPE_CHECKING:
    from ..training.state import State

SHOWN = 8
"""Samples that a line names."""

SEARCH_SECONDS = 5.0
"""For reading the samples of a step again."""


def name_samples(error: BaseException, attempt: Attempt, state: State) -> str:
    """Add a note with the samples to a mistake in the loss of one micro-batch, which `reason_of` puts into its line.
    Returns the note; "" if it is no such mistake.

    The sample of a label that torch names; else all of the micro-batch, unless it is the first step or an evaluation:
    what fails there is most likely wrong for every sample, so the note says what the batch is.
    """
    with contextlib.suppress(Exception):  # attributes of the error or the data set may not be as usual
        batch, where = getattr(error, "micro_batch", (None, None))
        if batch is None or isinstance(error, Ended) or not is_mistake(error):
            return ""
        suspects: list[int] = []
        label = re.search(r"Target (-?\d+) is out of bounds", str(error))
        if where and (numbers := _numbers(attempt, state, where.step)):
            mine = numbers[where.id]
            suspects = _with_value(batch, int(label[1]), mine) if label else mine * bool(where.step)
        note = f"({_listed(suspects, attempt) if suspects else f'the batch is {described(batch)}'})"
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
        return note
    return ""


def say_hints(error: BaseException, attempt: Attempt, state: State) -> str:
    """Say on rank 0, after a step that was not finite, which of its samples are not, and the command that looks into
    it. A hint only: the search has little time, and a value may be masked. Returns what it says of the samples."""
    if not (isinstance(error, NonFinite) and attempt.lead):
        return ""
    step, text = state.step + 1, ""
    with contextlib.suppress(Exception):  # the search may read what cannot be read
        if bad := _not_finite(attempt, state, step - 1):
            text = f"{_listed(bad, attempt)} of step {step} has values that are not finite"
            attempt.say(f"evenkeel: {text}")
    if command := replay_command(attempt, step):
        attempt.say(f"evenkeel: to see where it begins: {command}")
    return text


def replay_command(attempt: Attempt, step: int) -> str:
    """The command that looks into a step, counted from 1; "" if it was removed."""
    package = __package__.partition(".")[0]
    command = f"python -m {package} replay {shlex.quote(str(near(attempt.path)))} --step {step}"
    return command if find_spec(f"{package}.time_travel") else ""


def _numbers(attempt: Attempt, state: State, step: int) -> list[list[int]]:
    """The samples of a step, by micro-batch; none for data without numbers."""
    dataset = attempt.sets[TRAINING]
    if stream_of(dataset) or state.refresh:
        return []
    plan = attempt.plan
    return samples_of(whole_steps(dataset, attempt.config, plan.micro_batch, plan.fixed_micro_batches), step)


def _with_value(batch: Any, value: int, numbers: list[int]) -> list[int]:
    """The samples of a batch that have this value in a tensor of whole numbers."""
    whole = [it for it in tensors_in(batch) if not it.is_floating_point() and it.dim() and len(it) == len(numbers)]
    rows = {row for it in whole for row in it.reshape(len(numbers), -1).eq(value).any(1).nonzero().flatten().tolist()}
    return [numbers[row] for row in sorted(rows)]


def _not_finite(attempt: Attempt, state: State, step: int) -> list[int]:
    """The samples of a step that have values that are not finite, as far as they can be read in time; none if all
    have, as with a mask of -inf."""
    dataset, until = attempt.sets[TRAINING], time.monotonic() + SEARCH_SECONDS
    finite: dict[int, bool] = {}
    for number in [number for part in _numbers(attempt, state, step) for number in part]:
        if time.monotonic() > until:
            break
        finite[number] = all(bool(it.isfinite().all()) for it in tensors_in(collate([dataset[number]])))
    return [number for number, is_finite in finite.items() if not is_finite] if any(finite.values()) else []


def _listed(samples: list[int], attempt: Attempt) -> str:
    """Such as "sample 7" or "one of the samples 1, 2, 3", as the user's own data set counts them."""
    shown = [str(inner_index(attempt.sets[TRAINING], number)) for number in samples[:SHOWN]]
    if len(samples) == 1:
        return f"sample {shown[0]}"
    more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
    return f"one of the samples {', '.join(shown)}{more}"

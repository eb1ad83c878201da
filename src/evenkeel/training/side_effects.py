"""What the passes of a step change besides gradients and buffers: each rank changes its own, as often as it has
micro-batches, and a stop in mid-step would save a part of it. Also losses that a step would weigh wrongly."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from math import isclose, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import EndedHere
from ..common.naming import listed
from ..data.batch import tensors_in, to_device
from ..data.randomness import generators_kept
from ..distributed.data_parallel import rows_of
from .buffers import Buffers
from .compilation import uncompiled
from .digest import on_host, word_sum
from .evaluation import evaluating, tensors_restored
from .state import State
from .state_dicts import local_rows
from .task_state import all_numbers, changed_numbers, is_readable

log = logging.getLogger(__name__)

STATISTICS = ("num_batches_tracked", "zero_point")
"""How the names of buffers end whose mean is right, though they are integers: BatchNorm's, and those of observers."""


class SideEffects:
    """Looks in steps 1, 2, 4, 8, ..., so that the cost vanishes.

    Args:
        state: whose weights only a commit may change.
        on: not with --verify-every, which finds and mends faulty memory itself.
        loss: if it is a method of a task, numbers in the task's attributes count, as do those of modules.
        network: the part of the model that learns; default: all of it.
    """

    def __init__(self, state: State, loss: Any, on: bool = True, network: nn.Module | None = None) -> None:
        self._state, self._steps, self._on, self._network = state, 0, on, network or state.model
        self._frozen = {name for name, it in self._network.named_parameters() if not it.requires_grad}
        self._task = getattr(getattr(loss, "_embed", loss), "__self__", None)  # of a WholeBatch too
        self._weights: dict[str, int] = {}
        self._numbers: dict[str, float] = {}
        self._warned: set[str] = set()
        self._micro_batches = 0

    def record(self, micro_batches: int) -> None:
        """Record, before the passes of a step of so many micro-batches, what they must not change."""
        self._steps += 1
        self._micro_batches = micro_batches
        looks = self._on and self._steps & (self._steps - 1) == 0
        self._weights = self._sums() if looks else {}
        self._numbers = dict(self._find_numbers()) if looks else {}

    def check(self) -> None:
        """The passes are over.

        Raises:
            EndedHere: they have changed weights, or let some learn that were frozen, and are left out of a step.
        """
        if not self._weights:
            return
        now = self._sums()
        for name, then in self._weights.items():
            if then != now[name]:
                raise EndedHere(
                    f"loss() or the model's forward() (or faulty memory) changes {name}: each rank would change its "
                    "own, as often as it has micro-batches; change them in after_step(model, step, losses), also what "
                    "max_norm of an Embedding does, and start over with --fresh"
                )
        learning = [name for name, it in self._network.named_parameters() if it.requires_grad]
        if thawed := [name for name in learning if name in self._frozen]:
            raise EndedHere(
                f"frozen at the start, and now with requires_grad: {listed(thawed)}; steps have no gradient of such "
                "parameters: do not freeze them in model(), set unused_parameters = True in the task's class, and set "
                "requires_grad in loss(model, batch, step)"
            )
        changed = changed_numbers(self._numbers, dict(self._find_numbers()))
        new = [name for name in changed if name not in self._warned]
        self._warned |= {*new}
        if modes := [name for name in new if changed[name] is False]:
            log.warning(
                "loss() sets %s from evaluation to training mode, which --freeze or model() had set: dropout and "
                "BatchNorm's statistics are on; call .train() in model(), not in loss()", listed(modes),
            )  # fmt: skip
        if numbers := [name for name in new if not isinstance(changed[name], bool)]:
            log.warning(
                "loss() changes %s: no checkpoint has that, and each rank has its own; if later steps depend on it, "
                "change it in after_step() and save it in state_dict() of the task", listed(numbers),
            )  # fmt: skip

    def check_buffers(self, total: Callable[[], Tensor]) -> None:
        """Warn of saved integers and flags that are no statistics, if micro-batches were averaged; `total` returns the
        step's sums, which end with the changes of buffers."""
        if not self._weights or self._micro_batches == 1:
            return
        new = [name for name in _odd_buffers(self._state.buffers, total) if name not in self._warned]
        self._warned |= {*new}
        if new:
            log.warning(
                "the model's passes change its buffer %s: a step adds the mean of its micro-batches' changes, each "
                "from the step's first values; right for BatchNorm, but not for a queue and its pointer, counts of "
                "samples or tables initialised by data: save those in the task's state_dict() and change them in "
                "after_step(), or start a new run with --micro-batches 1", listed(new),
            )  # fmt: skip

    def _sums(self) -> dict[str, int]:
        rows = zip(self._state.names.values(), local_rows(self._state.parameters), strict=True)
        sums = on_host({name: word_sum(it.detach()) for name, it in rows})
        for name, count in self._state.sharding.writes().items() if self._state.sharding else ():
            sums[name] += count
        return sums

    def _find_numbers(self) -> Iterator[tuple[str, float]]:
        for name, it in self._state.model.named_modules():
            yield ".".join(filter(None, ("model", name, "training"))), it.training
        later = self._steps > 1  # the first step may fill caches; one that grows has another name
        yield from all_numbers(self._task, self._state.model, later)
        if later:
            buffers, saved = self._state.model.named_buffers(), self._state.buffers.committed
            here = ((name, it) for name, it in buffers if name not in saved and is_readable(it))
            yield from on_host({f"model.{name} {list(it.shape)}": word_sum(it.detach()) for name, it in here}).items()


def _odd_buffers(buffers: Buffers, total: Callable[[], Tensor]) -> Iterator[str]:
    """The names of integers that change in another way than a count of steps does, which every micro-batch moves by
    one, and of flags (bool or uint8) that change at all: a flag may say that data has initialised something."""
    if not buffers.numel or all(group.wide.is_floating_point for group in buffers.groups):
        return
    parts = total()[-buffers.numel :].cpu().split([group.committed.numel() for group in buffers.groups])  # type: ignore[no-untyped-call]
    for group, part in zip(buffers.groups, parts, strict=True):
        if group.wide.is_floating_point:
            continue
        most = 0 if group.committed.dtype in (torch.bool, torch.uint8) else 1
        # three thirds of a count may not add up to exactly one
        odd = (part - part.round()).abs().maximum(part.abs() - most) > 1e-6
        for name, each in zip(group.names, odd.split([it.numel() for it in group.live]), strict=True):
            if each.any() and not name.endswith(STATISTICS):
                yield name


def warn_of_sums(method: str, task: Any, device: torch.device, samples: int, model: nn.Module, batch: Any) -> None:
    """Warn of numbers of the task's `method(model, batch)` that grow in proportion when a few samples are repeated.

    The numbers of a loss that compares samples do not. Nothing is said if the batch cannot be cut, if the call fails,
    or if a copy of the task would share what the method may change. Generators, buffers and modes are restored.
    """
    few, same = list(range(min(16, samples // 3))), partial(isclose, rel_tol=0.01)
    try:
        uncut = any(it.is_nested or (it.dim() and len(it) != samples) for it in tensors_in(batch))
        if uncut or not few or not _is_plain(tuple(vars(task).values())):
            return
        compute, batch = getattr(copy.copy(task), method), to_device(batch, device)
        with generators_kept(), tensors_restored(model), evaluating(model), uncompiled(), torch.no_grad():
            one, two, three = (_numbers(compute(model, rows_of(batch, few * times, samples))) for times in (1, 2, 3))
        grow = [it for it, n in one.items() if n and isfinite(n) and same(2 * n, two[it]) and same(3 * n, three[it])]
    except Exception:
        return
    if grow:
        log.warning(
            "%s() returns the sum over the batch's samples (%s), but batches are weighed as means, so it depends on "
            "--batch-size and --micro-batch: return the mean, by .mean() or reduction='mean'", method, listed(grow),
        )  # fmt: skip


def warn_of_missing(batch: Any, samples: int) -> bool:
    """Warn if all tensors of a batch have fewer rows than it has samples. One row may be all of them, one after the
    other, and the samples may be in another dimension. Returns whether it has warned."""
    tensors = [it for it in tensors_in(batch) if not it.is_nested and it.dim()]
    rows = {len(it) for it in tensors}
    if len(rows) != 1 or not 1 < min(rows) < samples or any(samples in it.shape for it in tensors):
        return False
    log.warning(
        "collate() made %d rows of %d samples: if it leaves samples out, they count all the same in the weights of "
        "batches and in metrics; keep all, and give bad ones a weight of 0 in loss()", *rows, samples,
    )  # fmt: skip
    return True


def _is_plain(value: Any) -> bool:
    """Whether a call cannot change a value in place: a constant, a tuple of such, a loss of torch's without tensors."""
    plain_loss = type(value).__module__ == nn.modules.loss.__name__ and not value.state_dict()
    plain = value is None or plain_loss or isinstance(value, (int, float, str, Path))
    return plain or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _numbers(found: Any) -> dict[str, float]:
    """The scalars in the result of `loss()` or `metrics()`, by name."""
    loss, parts = found if isinstance(found, tuple) else (found, {})
    named = loss if isinstance(loss, dict) else {"loss": loss, **parts}
    return {name: float(it) for name, it in named.items() if isinstance(it, Tensor) and it.dim() == 0}

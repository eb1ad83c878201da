"""What the passes of a step change besides gradients and buffers: each rank changes its own, as often as it has
micro-batches, and a stop in mid-step would save a part of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..common.errors import EndedHere
from ..common.naming import listed
from .state import State

log = logging.getLogger(__name__)


class SideEffects:
    """Looks in steps 1, 2, 4, 8, ..., so that the cost vanishes.

    Args:
        state: whose weights only a commit may change. Those that --shard divides are not looked at.
        on: not with --verify-every, which finds and mends faulty memory itself.
        loss: if it is a method of a task, numbers in the task's attributes count, as do those of modules.
    """

    def __init__(self, state: State, loss: Any, on: bool = True) -> None:
        self._state, self._steps, self._on = state, 0, on
        self._task = getattr(getattr(loss, "_embed", loss), "__self__", None)  # of a WholeBatch too
        self._weights: list[int] = []
        self._numbers: dict[str, float] = {}
        self._told: set[str] = set()

    def begin(self) -> None:
        """The passes of a step begin."""
        self._steps += 1
        looks = self._on and self._steps & (self._steps - 1) == 0 and not self._state.sharding
        self._weights = bit_sums(self._state.names) if looks else []
        self._numbers = dict(self._find_numbers()) if looks else {}

    def check(self) -> None:
        """The passes are over.

        Raises:
            EndedHere: they have changed weights.
        """
        if not self._weights:
            return
        for name, then, now in zip(self._state.names.values(), self._weights, bit_sums(self._state.names), strict=True):
            if then != now:
                raise EndedHere(
                    f"loss() or the model's forward() (or faulty memory) changes {name}: each rank would change its "
                    "own, as often as it has micro-batches; change them in after_step(model, step, losses), also what "
                    "max_norm of an Embedding does, and start over with --fresh"
                )
        found = dict(self._find_numbers())
        changed = [name for name, then in self._numbers.items() if found.get(name, then) != then == then]
        if new := [name for name in changed if name not in self._told]:
            self._told |= {*new}
            log.warning(
                "loss() changes %s: no checkpoint has that number, and each rank has its own; change it in "
                "after_step() and save it in state_dict() of the task, or make it a buffer of the model", listed(new),
            )  # fmt: skip

    def _find_numbers(self) -> Iterator[tuple[str, float]]:
        modules = ((f"model.{name}".rstrip("."), it) for name, it in self._state.model.named_modules())
        for owner, it in [("self", self._task), *modules]:
            for name, value in getattr(it, "__dict__", {}).items():
                if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
                    value = value.item()
                if type(value) in (int, float):
                    yield f"{owner}.{name}", value


def bit_sums(tensors: Iterable[Tensor]) -> list[int]:
    """For each tensor the sum of its bits as integers, by which a change is found."""
    return [_bit_sum(it.detach().flatten().view(torch.uint8)) for it in tensors]


def _bit_sum(octets: Tensor) -> int:
    even = len(octets) - len(octets) % 8 if octets.storage_offset() % 8 == 0 else 0  # ten times as fast
    return int(octets[:even].view(torch.int64).sum()) + int(octets[even:].sum())

"""What a task remembers besides its networks, as a part of the committed state: a statistic, a queue, a weight.

It changes in `Task.after_step` alone, which is a part of each commit: all ranks call it with the same values, and none
does for a step that is left out. `loss` is called as often as a rank has micro-batches, so a state that it changes
would be another on each rank. That is looked for: before a commit the state must be what the last one has left, and
before a checkpoint it must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import Ended, EndedHere, Refusal, place_of
from ..common.naming import kind_of
from ..data.randomness import derive, seed_computation
from ..distributed.collectives import no_collectives
from ..distributed.world import World
from .evaluation import evaluating, same_tensors
from .schedulers import plain
from .staging import Path, map_tensors
from .task import Task, defines

log = logging.getLogger(__name__)

REMEDY = (
    "only after_step(model, step, losses) may change it, by these values: loss() and metrics() are not called equally "
    "often on each rank, and show() on one rank only; mend the task and begin anew with --fresh"
)


class TaskState:
    """The state of a task that defines `state_dict`, `load_state_dict` or `after_step`.

    Args:
        task: whose it is.
        seed: the run's; `after_step` may draw.
        world: whose ranks must agree.

    Raises:
        Refusal: it could not be saved or not be loaded.
    """

    def __init__(self, task: Task, seed: int, world: World) -> None:
        self._task, self._seed, self._world, self._commits = task, seed, world, 0
        saves, loads = (defines(type(task), name) for name in ("state_dict", "load_state_dict"))
        if saves != loads:
            has, lacks = ("state_dict()", "load_state_dict(state)")[:: 1 if saves else -1]
            raise Refusal(f"the task {type(task).__name__} defines {has} without {lacks}: define both")
        self.now: dict[str, Any] | None = self._read() if saves else None
        """The state after the last commit; None: the task keeps none."""
        self._mark = digest(self.now)
        self.losses: dict[str, float] = {}
        """The loss and its parts in the step that is committed next."""

    @staticmethod
    def of(task: Task, seed: int, world: World) -> TaskState | None:
        """The task's; None if it defines nothing of it."""
        own = any(defines(type(task), name) for name in ("state_dict", "load_state_dict", "after_step"))
        return TaskState(task, seed, world) if own else None

    def _read(self) -> dict[str, Any]:
        returned, name = self._task.state_dict(), f"state_dict() of {type(self._task).__name__}"
        if not isinstance(returned, Mapping):
            raise Refusal(f"{name} returned {kind_of(returned)}: it must return a dict")

        def strided(tensor: Tensor, path: Path) -> Tensor:
            if tensor.is_nested or tensor.layout is not torch.strided:
                raise Refusal(f"{name} has {path[-1]!r}, which is no dense tensor: save its parts")
            return tensor

        return map_tensors(plain(dict(returned), name, drop=()), strided)  # type: ignore[no-any-return]

    def _read_later(self) -> dict[str, Any]:
        """The same while the run is at work, where a mistake is no refusal any more."""
        try:
            return self._read()
        except Refusal as refusal:
            raise EndedHere(str(refusal)) from None

    def check(self) -> None:
        """Now and then, before a commit: end the run if anything but the last commit has changed the state."""
        if self._mark and self._mark != digest(self._read_later()):
            raise EndedHere(f"the state of {type(self._task).__name__} has changed outside of after_step(): {REMEDY}")

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """For an evaluation: end the run if it changes the state, which a stop might then lose or a rank not have."""
        self._mark = "" if self.now is None else digest(self._read_later())
        yield
        self.check()

    def commit(self, model: nn.Module, step: int) -> None:
        """Let the task take in a step that all ranks have taken, with its number from 1."""
        seed_computation(derive(self._seed, "after_step", step), self._world.devices)
        refused = "" if self._task.collectives else "after_step()"
        # buffers and modes that it left changed would be lost by a stop
        with torch.no_grad(), no_collectives(refused), same_tensors(model), evaluating(model):
            self._task.after_step(model, step, self.losses)
        if self.now is None:
            return
        self.now = self._read_later()
        self._commits += 1
        # after 1, 2, 4, 8, ... of them, so that what it costs goes to nothing
        self._mark = digest(self.now) if self._commits & (self._commits - 1) == 0 else ""

    def compare(self) -> None:
        """End the run on all ranks if they have other states."""
        everywhere = self._world.gather(digest(self.now))
        for rank, found in enumerate(everywhere):
            if found != everywhere[0]:
                raise Ended(
                    f"state_dict() of {type(self._task).__name__} is not the same on rank 0 and rank {rank}: {REMEDY}"
                )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what a commit has left, with tensors on the CPU; raises Ended if that fails."""
        try:
            self._task.load_state_dict(map_tensors(saved, lambda tensor, _: tensor.clone()))
        except Exception as error:
            raise Ended(
                f"load_state_dict() of {type(self._task).__name__} fails{place_of(error.__traceback__)}: "
                f"{type(error).__name__}: {error}; bring back the code that saved the state, or start over with --fresh"
            ) from error
        self.now = self._read_later()
        self._mark = digest(self.now)


def load_task_state(own: TaskState | None, saved: Mapping[str, Any] | None) -> None:
    """Load a task's part of a checkpoint; raises Ended if the task has no such part any more."""
    keeps = own is not None and own.now is not None
    if saved is not None and not keeps:
        raise Ended(
            "the checkpoint has a state of the task, and the task has no state_dict() any more; bring it back, or "
            "start over with --fresh"
        )
    if saved is None and keeps:
        log.warning("the checkpoint is older than the task's state_dict(): its state begins anew")
    elif own and saved is not None:
        own.load(saved)


def digest(state: Any) -> str:
    """A digest of every bit of nested tensors and plain data; empty of None."""
    if state is None:
        return ""
    found = hashlib.sha256()

    def add(tensor: Tensor, path: Path) -> None:
        values = tensor.detach().cpu().contiguous().flatten()
        found.update(f"{path} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(values.view(torch.uint8).numpy().data)

    found.update(repr(map_tensors(state, add)).encode())
    return found.hexdigest()[:16]

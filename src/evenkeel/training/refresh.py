"""Training data that the model makes: pseudo-labels, hard negatives, replay, self-play (`Task.refresh`).

It is a function of weights, and a resume in mid-epoch has other weights than the epoch began with. So the weights of
the epoch's first step, and the task's own state then, are a part of the committed state, and all ranks of each start
make the same data from them. The data itself is not saved: it may be large, and of any type.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..common.errors import Ended, EndedHere, Refusal
from ..common.phases import REFRESH, activity
from ..config import Config
from ..data.data_digest import Digest, of_tensors
from ..data.dataset import SizedDataset
from ..data.order import token_batches
from ..data.randomness import derive, generators_kept, seed_computation, seed_task
from ..data.streams import stream_of
from ..distributed.collectives import no_collectives
from ..distributed.world import World
from .compilation import uncompiled
from .ema import frozen_copy
from .evaluation import evaluating, tensors_restored
from .precision import autocast
from .task import Task, defines
from .task_data import refreshed_set
from .task_state import TaskState

log = logging.getLogger(__name__)


class Refresh:
    """What the data of the present epoch is made from: a copy of the model, and the task's state.

    Args:
        task: whose `refresh` makes the data.
        model: the bare model on its device.
        config: the options.
        world: the ranks.

    Attributes:
        epoch: the epoch at whose first step the copy was made; -1: none yet, so that `train_dataset` has the data.
        digest: of the data that was made; None: it has none.
    """

    def __init__(self, task: Task, model: nn.Module, config: Config, world: World) -> None:
        self._task, self._config, self._world = task, config, world
        self._model = frozen_copy(model, "refresh()")
        self._task_values: Mapping[str, Any] | None = None
        self.epoch = -1
        self.digest: Digest | None = None

    @staticmethod
    def of(task: Task, model: nn.Module, config: Config, world: World) -> Refresh | None:
        """One for a task that defines `refresh`; None for others."""
        return Refresh(task, model, config, world) if defines(type(task), "refresh") else None

    def due(self, epoch: int) -> bool:
        """Whether data is made for this epoch."""
        return epoch % self._task.refresh_every == 0

    def take(self, epoch: int, weights: Mapping[str, Tensor], task_state: TaskState | None) -> None:
        """Copy the committed weights and the task's state at the first step of an epoch."""
        self._model.load_state_dict(weights)
        for device in {it.device for it in weights.values() if it.is_cuda}:
            torch.cuda.synchronize(device)  # a rescue copies on another stream, and must not see half of this
        self._task_values, self.epoch, self.digest = task_state.kept() if task_state else None, epoch, None

    def data(self, train_set: SizedDataset, task_state: TaskState | None) -> SizedDataset:
        """The data made from the copy, in the order of ``train_set``; ``train_set`` if the task returns None.

        Raises:
            EndedHere: it does not fit, or `refresh` changes the weights or the task's state.
        """
        if self.epoch < 0:
            return train_set
        versions, before = [parameter._version for parameter in self._model.parameters()], of_tensors(train_set)
        with activity.during(REFRESH), task_state.at(self._task_values) if task_state else nullcontext():
            made = self._call()
        if versions != [parameter._version for parameter in self._model.parameters()]:
            raise EndedHere("refresh() changed the weights of the model, which a resume needs; copy the model first")
        if of_tensors(train_set) != before:
            raise EndedHere("refresh() changed train_dataset()'s tensors, and a resume would not; return new ones")
        try:
            return train_set if made is None else refreshed_set(self._task, self._config, made, train_set)
        except Refusal as refusal:
            raise EndedHere(str(refusal)) from None

    def _call(self) -> SizedDataset | None:
        # each call of a network is progress, for the watch for hangs
        marks = register_module_forward_hook(lambda *_: activity.enter(REFRESH, f"epoch {self.epoch}"))
        refused = "" if self._task.collectives else "refresh()"
        precision = autocast(self._config.precision, self._world.device.type)
        try:
            with generators_kept(), torch.no_grad(), tensors_restored(self._model), evaluating(self._model):
                seed_computation(derive(self._config.seed, "refresh", self.epoch), self._world.devices)
                with precision, uncompiled(), no_collectives(refused), _same_data(self._task, self._config.seed):
                    return self._task.refresh(self._model, self.epoch)
        finally:
            marks.remove()

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, and plain data."""
        model = self._model.state_dict()
        return {"model": model, "task": self._task_values, "epoch": self.epoch, "digest": self.digest}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on any device."""
        self._model.load_state_dict(saved["model"])
        self._task_values, self.epoch, self.digest = saved["task"], saved["epoch"], saved["digest"]


@contextmanager
def _same_data(task: Task, seed: int) -> Iterator[None]:
    """Within it `task.train_dataset()` draws as at the start: another random split would have samples of the test."""
    method, redefined = task.train_dataset, "train_dataset" in vars(task)

    def seeded() -> SizedDataset:
        with generators_kept():
            seed_task(seed, "data")
            return method()

    vars(task)["train_dataset"] = seeded
    try:
        yield
    finally:
        del vars(task)["train_dataset"]
        if redefined:
            vars(task)["train_dataset"] = method


def load_refresh(refresh: Refresh | None, saved: Mapping[str, Any] | None) -> None:
    """Load this part of a checkpoint; raises Ended if the task no longer has `refresh`."""
    if saved is not None and refresh is None:
        raise Ended("the run's data is made by refresh(), which the task no longer has; restore it, or use --fresh")
    if refresh and saved is not None:
        refresh.load_state_dict(saved)
    elif refresh:
        log.warning("the checkpoint is older than the task's refresh(): it is called from the next epoch on")


def refuse_unrefreshable(task: Task, train_set: SizedDataset) -> None:
    """Refuse a task whose data cannot be refreshed."""
    if not defines(type(task), "refresh"):
        return
    if not isinstance(task.refresh_every, int) or task.refresh_every < 1:
        raise Refusal(f"refresh_every is {task.refresh_every!r}: it is a number of epochs, 1 or more")
    if token_batches(train_set):
        raise Refusal("refresh() --batch-tokens: new samples have other lengths; leave one of the two out")
    if stream_of(train_set):
        raise Refusal(
            "refresh(): train_dataset() returned a stream, whose samples are made once; return a map-style data set, "
            "or leave refresh() out"
        )

"""A task's own state besides its networks, as a part of the committed state: a statistic, a queue, a weight.

Only `Task.after_step` may change it. That is a part of each commit: all ranks call it with the same values, and none
does for a skipped step. `loss` is called as often as a rank has micro-batches, so a state that it changes would differ
between ranks. This is checked: before a commit the state must be as the last commit left it, and before a checkpoint
it must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import Ended, EndedHere, Refusal, place_of
from ..common.naming import kind_of, listed
from ..data.randomness import derive, seed_computation
from ..distributed.collectives import no_collectives
from ..distributed.world import World
from .digest import word_sum
from .evaluation import evaluating, tensors_restored
from .schedulers import plain
from .staging import Keys, map_tensors
from .task import Task, defines

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 2**20
"""Of a task's tensors that are looked at for changes."""

REMEDY = (
    "only after_step(model, step, losses) may change it, by these values: loss() and metrics() are not called equally "
    "often on each rank, and show() on one rank only; fix the task and start over with --fresh"
)

MOST_ITEMS = 100
"""Of a list or dict in which changed numbers are looked for; longer ones are tables of data."""


class TaskState:
    """The state of a task that defines `state_dict`, `load_state_dict` or `after_step`.

    Args:
        task: whose it is.
        seed: the run's; `after_step` may draw.
        world: whose ranks must agree.
        averages: there is a second model, of --ema, made at the start.

    Raises:
        Refusal: it could not be saved or loaded.
    """

    def __init__(self, task: Task, seed: int, world: World, averages: bool = False) -> None:
        self._task, self._seed, self._world, self._averages = task, seed, world, averages
        self._commits, self._unsaved = 0, set[str]()
        self._lost = ""  # what `after_step` has changed in vain, in a line
        saves, loads = (defines(type(task), name) for name in ("state_dict", "load_state_dict"))
        if saves != loads:
            has, lacks = ("state_dict()", "load_state_dict(state)")[:: 1 if saves else -1]
            raise Refusal(f"the task {type(task).__name__} defines {has} without {lacks}: define both")
        self.now: dict[str, Any] | None = self._read() if saves else None
        """The state after the last commit; None: the task has none."""
        self._mark = digest(self.now)
        self.losses: dict[str, float] = {}
        """The loss and its parts of the next step to commit."""

    @staticmethod
    def of(task: Task, seed: int, world: World, averages: bool = False) -> TaskState | None:
        """The task's state; None if it defines none of these methods."""
        own = any(defines(type(task), name) for name in ("state_dict", "load_state_dict", "after_step"))
        return TaskState(task, seed, world, averages) if own else None

    def _read(self) -> dict[str, Any]:
        returned, name = self._task.state_dict(), f"state_dict() of {type(self._task).__name__}"
        if not isinstance(returned, Mapping):
            raise Refusal(f"{name} returned {kind_of(returned)}: it must return a dict")

        def strided(tensor: Tensor, path: Keys) -> Tensor:
            if tensor.is_nested or tensor.layout is not torch.strided:
                raise Refusal(f"{name} has {path[-1]!r}, which is not a dense tensor: save its parts")
            if hasattr(tensor, "to_local"):
                raise Refusal(f"{name} has {path[-1]!r}, which --shard divides: save its full_tensor()")
            return tensor

        return map_tensors(plain(dict(returned), name, drop=()), strided)  # type: ignore[no-any-return]

    def _read_later(self) -> dict[str, Any]:
        """The same during training, where a mistake ends the run instead of refusing it."""
        try:
            return self._read()
        except Refusal as refusal:
            raise EndedHere(str(refusal)) from None

    def check(self) -> None:
        """Before some of the commits: end the run if anything but the last commit has changed the state."""
        if self._mark and self._mark != digest(self._read_later()):
            raise EndedHere(f"the state of {type(self._task).__name__} has changed outside after_step(): {REMEDY}")

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around an evaluation: end the run if it changes the state, because a stop could lose the change."""
        self._mark = "" if self.now is None else digest(self._read_later())
        yield
        self.check()

    def commit(self, model: nn.Module, step: int) -> None:
        """Call the task's `after_step` for a step that all ranks have taken; steps count from 1."""
        self._commits += 1
        looks = self._commits & (self._commits - 1) == 0  # after 1, 2, 4, 8, ... commits, so that the cost vanishes
        earlier, numbers = (digest(self.now), self._numbers(model)) if looks else ("", {})
        seed_computation(derive(self._seed, "after_step", step), self._world.devices)
        refused = "" if self._task.collectives else "after_step()"
        # a stop would lose changes of buffers and modes
        with torch.no_grad(), no_collectives(refused), tensors_restored(model), evaluating(model):
            then = dict(_put_back(model)) if looks else {}
            self._task.after_step(model, step, self.losses)
            lost = changed_numbers(then, dict(_put_back(model))) if looks else {}
        if lost:
            self._lost = (
                f"after_step() changes {listed(list(lost))}, which is put back after it: keep values in attributes of "
                "the task, with state_dict() and load_state_dict(state), and set requires_grad in loss(model, batch, "
                "step)"
            )
        if self.now is not None:
            self.now = self._read_later()
        self._mark = digest(self.now) if looks else ""
        if looks:
            self._warn_of_unsaved(changed_numbers(numbers, self._numbers(model)), self._mark != earlier)

    def _numbers(self, model: nn.Module) -> dict[str, float]:
        return dict(all_numbers(self._task, model, self._commits > 1))  # the first call may fill caches

    def _warn_of_unsaved(self, changed: Iterable[str], saved: bool) -> None:
        """Warn if `after_step` has changed what no checkpoint has; if it has also changed the task's state, which is
        ``saved``, it is trusted to have it there."""
        new = [name for name in changed if name not in self._unsaved]
        own, of_model = ([name for name in new if name.startswith(start)] for start in ("self.", "model."))
        if own and not saved:
            self._unsaved |= {*own}
            log.warning(
                "after_step() changes %s, which state_dict() does not save: a run that is continued has the first "
                "value again; define state_dict() and load_state_dict(state) with it", listed(own),
            )  # fmt: skip
        if of_model and (self._averages or not saved):
            self._unsaved |= {*of_model}
            log.warning(
                "after_step() changes %s, which is no buffer: a run that is continued, and the model that --ema "
                "evaluates, have the first value; compute it in loss(model, batch, step) and metrics()",
                listed(of_model),
            )  # fmt: skip

    def compare(self) -> None:
        """End the run on all ranks if their states differ, or if `after_step` changes what is put back: not within a
        commit, which would be half done."""
        if self._lost:
            raise EndedHere(self._lost)
        everywhere = self._world.all_gather(digest(self.now))
        for rank, found in enumerate(everywhere):
            if found != everywhere[0]:
                raise Ended(
                    f"state_dict() of {type(self._task).__name__} is not the same on rank 0 and rank {rank}: {REMEDY}"
                )

    def kept(self) -> dict[str, Any] | None:
        """A copy of the state; None: the task has none."""
        return None if self.now is None else map_tensors(self.now, lambda tensor, _: tensor.detach().cpu().clone())

    @contextmanager
    def at(self, earlier: Mapping[str, Any] | None) -> Iterator[None]:
        """With the state of an earlier commit, as :meth:`kept` returned it; then go back to the present one."""
        now = self.kept()
        if now is None or earlier is None or digest(now) == digest(earlier):
            with self.unchanged():
                yield
            return
        self.now = now  # a rescue saves this copy, whatever is loaded here
        try:
            self._load(earlier)
            with self.unchanged():
                yield
        finally:
            self.load(now)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the state of a commit, with tensors on the CPU; raises Ended if that fails."""
        self._load(saved)
        self.now = self._read_later()
        self.now = self.kept()  # apart from the task's own tensors: a rescue may still write it while `at` loads others
        self._mark = digest(self.now)

    def _load(self, saved: Mapping[str, Any]) -> None:
        try:
            self._task.load_state_dict(map_tensors(saved, lambda tensor, _: tensor.clone()))
        except Exception as error:
            raise Ended(
                f"load_state_dict() of {type(self._task).__name__} fails{place_of(error.__traceback__)}: "
                f"{type(error).__name__}: {error}; restore the code that saved the state, or start over with --fresh"
            ) from error


def load_task_state(own: TaskState | None, saved: Mapping[str, Any] | None) -> None:
    """Load a task's part of a checkpoint; raises Ended if the task no longer has such a part."""
    keeps = own is not None and own.now is not None
    if saved is not None and not keeps:
        raise Ended(
            "the checkpoint has a state of the task, but the task no longer has state_dict(); restore it, or "
            "start over with --fresh"
        )
    if saved is None and keeps:
        log.warning("the checkpoint is older than the task's state_dict(): its state starts anew")
    elif own and saved is not None:
        own.load(saved)


def _put_back(model: nn.Module) -> Iterator[tuple[str, int]]:
    """What `tensors_restored` puts back, by name: flags, and the sums of saved buffers; but not those that passes of
    BatchNorm and of observers change, as a by-product."""
    for name, parameter in model.named_parameters():
        yield f"requires_grad of {name}", int(parameter.requires_grad)
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) or type(module).__module__.startswith("torch.ao."):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and is_readable(buffer):
                yield f"the buffer {path}.{name}".replace(" .", " "), int(word_sum(buffer.detach()))


def numbers_of(owner: Any) -> Iterator[tuple[str, float]]:
    """The numbers among an object's attributes and those of its class, by name; also in short lists and dicts."""
    for name, value in {**vars(type(owner)), **getattr(owner, "__dict__", {})}.items():
        if isinstance(value, (list, dict)) and len(value) <= MOST_ITEMS:
            items = dict(value if isinstance(value, dict) else enumerate(value)).items()
            yield from ((f"{name}[{key!r}]", it) for key, it in items if type(it) in (int, float))
        if isinstance(value, Tensor) and value.numel() == 1 and is_readable(value):
            value = value.item()
        if type(value) in (int, float):
            yield name, value


def all_numbers(task: Any, model: nn.Module, contents: bool) -> Iterator[tuple[str, float]]:
    """The numbers of a task and of the model's modules, by name; with ``contents`` also, of the task, the lengths of
    lists and the sums of tensors. A tensor that grows has another name, and dicts are left out: they may be caches."""
    modules = ((f"model.{name}".rstrip("."), it) for name, it in model.named_modules())
    for owner, it in [("self", task), *modules]:
        yield from ((f"{owner}.{name}", value) for name, value in numbers_of(it))
    left = MOST_BYTES
    for name, value in dict(getattr(task, "__dict__", {})).items() if contents else ():
        if isinstance(value, (list, deque)):
            yield f"self.{name} (its length)", len(value)
        # one with a graph is of this step only
        elif isinstance(value, Tensor) and value.numel() > 1 and is_readable(value) and not value.requires_grad:
            left -= value.nbytes
            if left >= 0:
                yield f"self.{name} {list(value.shape)}", int(word_sum(value))


def changed_numbers(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Those that have another value now, with the one before. NaN does not count, nor what is gone."""
    return {name: then for name, then in before.items() if now.get(name, then) != then == then}


def is_readable(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor with values: not a row of --shard's, nor a view of what FSDP2 has freed."""
    ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    odd = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    return ordinary and not odd and tensor.untyped_storage().nbytes() >= tensor.nbytes


def digest(state: Any) -> str:
    """A digest of every bit of nested tensors and plain data; empty for None."""
    if state is None:
        return ""
    found = hashlib.sha256()

    def add(tensor: Tensor, path: Keys) -> None:
        values = tensor.detach().cpu().contiguous().flatten()
        found.update(f"{path} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(values.view(torch.uint8).numpy().data)

    found.update(repr(map_tensors(state, add)).encode())
    return found.hexdigest()[:16]

"""Exact evaluation: every test sample once, and the same result at any world size.

`DistributedSampler` pads the test set so that all ranks get equally many samples, and so counts some twice. Here
ranks take unequal shares of fixed micro-batches. Nothing is exchanged until the end; then the sums of all
micro-batches are gathered once and added in one order, whichever rank computed them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..common.errors import place_of, seen_at
from ..common.naming import TEST, in_set
from ..common.phases import EVALUATION, activity
from ..common.user_code import no_broadcast
from ..config import Config
from ..data.dataset import SizedDataset
from ..data.loader import make_loader
from ..data.plan import Plan
from ..data.randomness import derive, generators_kept, seed_computation, seed_task
from ..data.sampler import ElasticSampler
from ..distributed.collectives import no_collectives
from ..distributed.data_parallel import chunks, replicas
from ..distributed.transfer import Transfer
from ..distributed.world import World
from .checks import check_alike, check_metrics, checked_summary, takes
from .compilation import uncompiled
from .oom import note_batch
from .optimization import are_divided
from .precision import autocast
from .task import Task

log = logging.getLogger(__name__)

T = TypeVar("T")


class Evaluation:
    """A task's metrics over all test samples; call it as often as needed.

    Args:
        task: computes the metrics of a batch.
        model: the bare model or its average, because a DDP forward would wait for ranks that have no batch left.
        test_set: N samples, cut into micro-batches of the training's size, given to ranks in contiguous shares.
        config: micro-batch, loader workers, seed and precision.
        world: the ranks.
        name: the name of the set, which has its own random numbers.
    """

    def __init__(
        self, task: Task, model: nn.Module, test_set: SizedDataset, config: Config, world: World, name: str = TEST
    ) -> None:
        self.task, self.model, self.world, self.name = task, model, world, name
        self._compute: Callable[[nn.Module, Any], Any] = task.metrics
        self.precision = config.precision
        self.dataset, self.samples = test_set, len(test_set)
        plan = Plan.of(config, self.samples)
        # one GPU evaluates: with --strategy dp give it only its part of a training micro-batch
        micro_batch = chunks(plan.micro_batch, len(replicas(config.strategy, world.device)))[0]
        # the whole test set is one step of one epoch, in its own order
        self.sampler = ElasticSampler(
            test_set, self.samples, micro_batch, num_replicas=world.world_size, rank=world.rank,
            shuffle=False, seed=config.seed,
        )  # fmt: skip
        self.divided = are_divided(model.parameters())  # then a forward pass is a collective
        self.sampler.assignment = "padded" if self.divided else "share"
        self._transfer = Transfer(world.device)
        self._show_next = False
        self.shows = False
        """Whether to call the task's `show` for the first batch."""
        self.shown: Mapping[str, Any] = {}
        """The result of `show` in the last evaluation, on rank 0; with a divided model on all ranks."""
        self.batches = make_loader(test_set, self.sampler, name, config.num_workers, world.device)

    def __call__(self) -> dict[str, float]:
        """The metrics, the same on every rank. Afterwards the model's mode and buffers are restored."""
        with activity.during(EVALUATION), tensors_restored(self.model):
            return self._evaluate()

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics by their full names, as reported."""
        return {in_set(self.name, name): value for name, value in metrics.items()}

    @torch.no_grad()
    def rehearse(self, *others: Callable[[nn.Module, Any], object]) -> dict[str, float] | None:
        """The metrics of the first micro-batch alone, computed by each rank for itself; None: it has too few samples
        for `summarize`, which may divide by the number in a class. Also calls each of `others` with (model, batch).

        So a mistake in a task's metrics shows now, not after an epoch. Buffers, generators and flags are restored.
        """
        with activity.during(EVALUATION), generators_kept(), tensors_restored(self.model), self._only_first() as size:
            with no_broadcast():
                sums = self._sums()
            for other in others:
                self.for_each_batch(partial(other, self.model), lambda _found, _samples: None)
            try:
                return self._summary({name: rows[0] for name, rows in sums.items()}, size)
            except (ArithmeticError, ValueError) as error:
                log.warning(
                    "summarize() fails for the first %d %s samples%s: %s: %s; if it fails for all samples too, the run "
                    "will end at its first evaluation",
                    size, self.name, place_of(error.__traceback__), type(error).__name__, error,
                )  # fmt: skip
                return None

    @contextmanager
    def _only_first(self) -> Iterator[int]:
        """Give this rank the first micro-batch, as if each micro-batch had its own rank; yields its size."""
        sampler = self.sampler
        place = sampler.rank, sampler.num_replicas
        sampler.rank, sampler.num_replicas = 0, sampler.plan.micro_batches_per_step
        try:
            yield sampler.micro_batches(0)[0].size
        finally:
            sampler.rank, sampler.num_replicas = place

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        sums = self._sums()
        mine = {name: torch.stack(per_micro_batch).cpu() for name, per_micro_batch in sums.items()}
        gathered = [of_rank for of_rank in self.world.all_gather(mine) if of_rank] or [{}]
        shapes = [{name: values.shape[1:] for name, values in of_rank.items()} for of_rank in gathered]
        with seen_at(self.task.metrics, self.task.loss):
            for others in shapes:
                check_alike(shapes[0], others)
        per_micro_batch = {name: torch.cat([of_rank[name] for of_rank in gathered]) for name in gathered[0]}
        return self._summary({name: values.sum(0) for name, values in per_micro_batch.items()}, self.samples)

    def _summary(self, sums: dict[str, Tensor], samples: int) -> dict[str, float]:
        seed_task(self.sampler.seed, "summarize")
        means = {name: values / samples for name, values in sums.items()}
        arguments = {"samples": samples} if takes(self.task.summarize, "samples") else {}
        with seen_at(self.task.summarize, self.task.metrics, self.task.batch_loss, self.task.loss):
            return checked_summary(self.task.summarize(means, **arguments))

    def _sums(self) -> dict[str, list[Tensor]]:
        """The task's metrics, by name: for each micro-batch of this rank their sums over its samples."""
        sums: dict[str, list[Tensor]] = {}

        def add(found: Any, samples: int) -> None:
            of_samples = _of_each(found, samples)
            with seen_at(self._compute, self.task.loss):
                check_metrics(of_samples, samples, sums)
            for name, values in of_samples.items():
                # counts are exact in float64, and a row for each micro-batch fixes the order of addition
                sums.setdefault(name, []).append(values.double().sum(0))

        self._show_next = self.shows and (self.divided or self.world.rank == 0)
        self.for_each_batch(self._measured, add)
        return sums

    def _measured(self, batch: Any) -> Any:
        """The task's metrics of a batch. For the very first batch also calls `show`."""
        found = self._compute(self.model, batch)
        if self._show_next:
            with tensors_restored(self.model), evaluating(self.model):  # perhaps on rank 0 only: it must change nothing
                self.shown = self.task.show(self.model, batch)
        self._show_next = False
        return found

    @torch.no_grad()
    def for_each_batch(self, compute: Callable[[Any], T], take: Callable[[T, int], None]) -> None:
        """Call `compute` for each batch of this rank in evaluation mode, and `take` with its result and its samples.

        This is not a generator, which would turn a StopIteration in a task into another error.
        """
        refused = "" if self.task.collectives else "the evaluation"
        passes = self.sampler.micro_batches(0)
        counted = len(self.sampler.plan.micro_batches(0, self.sampler.rank, self.sampler.num_replicas))
        with evaluating(self.model):
            for number, (micro_batch, batch) in enumerate(zip(passes, self.batches, strict=True)):
                activity.enter(EVALUATION, f"{number} of {len(passes)} micro-batches")  # again: each batch is progress
                # metrics may draw random numbers; how many loading has drawn depends on the loader processes
                purpose = f"{self.name} metrics"
                seed_computation(derive(self.sampler.seed, purpose, 0, micro_batch.start), self.world.devices)
                try:
                    with autocast(self.precision, self.world.device.type), uncompiled(), no_collectives(refused):
                        computed = compute(self._transfer(batch))
                except Exception as error:
                    note_batch(error, batch)
                    raise
                if number < counted:  # the rest are repeats, so that other ranks can go on
                    take(computed, micro_batch.size)


def _of_each(values: Any, samples: int) -> Any:
    """A task's metrics, with a scalar as the value of each sample."""
    if not isinstance(values, dict):
        return values  # refused by the next check
    return {name: it.expand(samples) if isinstance(it, Tensor) and it.dim() == 0 else it for name, it in values.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards restore the mode of each module, because some may be frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def tensors_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers, and the parameters' requires_grad, afterwards."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    holders = [(it._buffers, name, buffer) for it in model.modules() for name, buffer in it._buffers.items()]
    buffers = [(holder, name, buffer, buffer.clone()) for holder, name, buffer in holders if buffer is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for holder, name, buffer, value in buffers:
                if buffer.shape != value.shape:  # it has grown; the state refers to the same object
                    buffer.data = value
                holder[name] = buffer.copy_(value)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)

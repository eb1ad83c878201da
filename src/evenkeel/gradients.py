"""The gradient of one step: the mean over the global batch, whoever computes which part of it.

Each micro-batch contributes (its samples / the step's samples) x (its mean loss), so that uneven shares
and a short last step need no special case: a plain sum over micro-batches and ranks is the gradient of the mean
over the step's samples. DDP adds the ranks' parts up while the last micro-batch's backward pass still runs.

Two things that stock DDP gets wrong for an elastic job are mended here. A rank without a micro-batch takes part with
an exact zero instead of waiting for ever. And the statistics of BatchNorm follow all the micro-batches of a
step, not those that happened to run on rank 0: each micro-batch starts from the step's own statistics, and the
step moves them by the mean of the micro-batches' changes. They are therefore the same on all ranks, at any world size.
"""

# no `from __future__ import annotations` here: DDP compares a communication hook's annotations with real types
import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .activity import COMPUTING, DATA, REDUCTION, activity
from .data import to_device
from .plan import MicroBatch
from .randomness import derive, seed_everything
from .state import State
from .tasks import Task
from .world import World

# newer releases of torch warn about the old name
_BUFFER_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class Loss(nn.Module):
    """What DDP wraps: the model and its loss in one module, called with a batch, or None on an idle rank."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: Any) -> Tensor:
        """The batch's mean loss; for None a zero whose gradient is an exact zero for every parameter."""
        if batch is None:
            return torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum() * 0
        return self._task.loss(self.model, batch)


def wrap(model: nn.Module, task: Task, world: World) -> nn.Module:
    """The model with its loss, under DDP where there is a process group.

    DDP starts by giving every rank the weights of rank 0.
    """
    module = Loss(model, task)
    if not world.launched:
        return module
    ddp = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=task.unused_parameters,
        **{_BUFFER_OPTION: False},  # type: ignore[arg-type]  # `_BufferChanges` keeps them equal
    )
    ddp.register_comm_hook(None, _sum_over_ranks)
    # After its first backward pass DDP sorts parameters into buckets anew, and where a gradient stands in its bucket
    # decides in which order the ranks' parts are added. Were that pass a real step, the steps after a resume would
    # differ in the last bits from those of a run that never stopped; so it is an empty one.
    ddp(None).backward()
    ddp.zero_grad(set_to_none=True)
    return ddp


class Step(NamedTuple):
    """What a step has computed and not yet committed, besides the gradients."""

    loss: Tensor
    """This rank's share of the step's mean loss, a detached scalar on the device; the sum over ranks is the loss. Not
    read here, because that would make the host wait."""
    buffers: dict[str, Tensor]
    """New values of the model's buffers, the same on every rank."""


def backward(
    wrapped: nn.Module,
    state: State,
    micro_batches: Sequence[MicroBatch],
    batches: Iterable[Any],
    step_samples: int,
    seed: int,
    world: World,
) -> Step:
    """Compute and add up the gradient of one step; afterwards every rank holds it in ``.grad``.

    Args:
        wrapped: what :func:`wrap` returned, gradients cleared.
        state: the model in it; not changed but for its gradients.
        micro_batches: this rank's share of the step; may be empty.
        batches: their data, in the same order.
        step_samples: samples of the step over all ranks.
        seed: the run's seed; each micro-batch draws its own random numbers (dropout) from it.
        world: who takes part.
    """
    changes = _BufferChanges(state)
    loss = torch.zeros((), device=world.device)
    activity.enter(DATA)
    try:
        for number, (micro_batch, batch) in enumerate(zip(micro_batches, batches, strict=True), start=1):
            seed_everything(derive(seed, "micro-batch", micro_batch.step, micro_batch.id))
            weight = micro_batch.size / step_samples
            with nullcontext() if number == len(micro_batches) else _no_reduction(wrapped):
                activity.enter(COMPUTING)
                part = wrapped(to_device(batch, world.device)) * weight
                if number == len(micro_batches):
                    activity.enter(REDUCTION)
                # 1, or NaN where the loss is not finite: its gradient might be, and all ranks must hear of it
                part.backward(1 + 0 * part.detach())
            loss += part.detach()
            changes.collect(weight)
            activity.enter(DATA)
        activity.enter(REDUCTION)
        if not micro_batches:
            wrapped(None).backward()
    finally:
        state.rewind_buffers()
    return Step(loss, changes.summed(world))


def clip(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradient down to a 2-norm of at most ``max_norm`` (0: leave it as it is).

    Returns:
        The norm before, a scalar on the device, the same on every rank.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class _BufferChanges:
    """How the micro-batches of a step move a model's saved buffers: BatchNorm's running statistics and the like.

    Constants that a model registers with ``persistent=False`` are not among them and cost nothing.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.sums = {name: torch.zeros_like(buffer, dtype=torch.float64) for name, buffer in state.buffers.items()}

    @torch.no_grad()
    def collect(self, weight: float) -> None:
        """Take a micro-batch's change, weighted, and go back to the step's start for the next one."""
        for name, change in self.sums.items():
            buffer, base = self.state.buffers[name], self.state.committed_buffers[name]
            difference = buffer.double() - base.double()
            # where nothing changed, an infinite value (a mask, say) would give inf - inf
            change += torch.where(buffer == base, 0.0, difference) * weight
        self.state.rewind_buffers()

    @torch.no_grad()
    def summed(self, world: World) -> dict[str, Tensor]:
        """The buffers moved by the mean change over all micro-batches of all ranks."""
        if not self.sums:
            return {}
        total = world.sum(torch.cat([change.flatten() for change in self.sums.values()]))
        parts = torch.split(total, [change.numel() for change in self.sums.values()])
        moved = {}
        for (name, base), change in zip(self.state.committed_buffers.items(), parts, strict=True):
            # rounded, because thirds of one count need not add up to exactly one
            change = change if base.is_floating_point() else change.round()
            moved[name] = (base.double() + change.view_as(base)).to(base.dtype)
        return moved


def _no_reduction(wrapped: nn.Module) -> AbstractContextManager[None]:
    """Let gradients add up on this rank: DDP reduces in the last backward pass of a step only."""
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def _sum_over_ranks(
    _state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """DDP communication hook: stock all-reduce without the division, for the weights already are in the loss."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])

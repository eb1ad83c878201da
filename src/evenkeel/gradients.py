"""The gradient of one step: the mean over the global batch, whoever computes which part of it.

Each micro-batch contributes (its samples / the step's samples) x (its mean loss), so that uneven shares
and a short last step need no special case: a plain sum over micro-batches and ranks is the gradient of the mean
over the step's samples. A `reduction` says in which order it is taken.

Two things that stock DDP gets wrong for an elastic job are mended here. A rank without a micro-batch takes part with
an exact zero instead of waiting for ever. And the statistics of BatchNorm follow all the micro-batches of a
step, not those that happened to run on rank 0: each micro-batch starts from the step's own statistics, and the
step moves them by the mean of the micro-batches' changes. These and the loss are always added up in the order of the
`tree`, so they are the same on all ranks, and at any world size as far as the weights are.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .activity import COMPUTING, DATA, REDUCTION, activity
from .data import divide, samples_in, to_device
from .devices import replicas
from .memory import note_batch
from .mistakes import checked_loss, explain, missing_gradients
from .placement import devices_explained
from .plan import MicroBatch, Plan, chunks
from .precision import Precision, autocast
from .randomness import derive, seed_computation
from .reduction import Reduction, Ring, Tree
from .state import State
from .sync_batchnorm import peers_of
from .tasks import Task
from .transfer import Transfer
from .tree import Fold, Node
from .world import World

# newer releases of torch warn about the old name
_BUFFER_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class Loss(nn.Module):
    """What DDP wraps: the model and its loss in one module, called with a batch, or None on an idle rank."""

    def __init__(self, model: nn.Module, task: Task, precision: Precision = "fp32") -> None:
        super().__init__()
        self.model = model
        self._task, self._precision = task, precision
        # not asked for in `forward`, because a replica of DataParallel has no parameters to ask
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")

    def forward(self, batch: Any) -> Tensor:
        """The batch's mean loss; for None a zero whose gradient is an exact zero for every parameter."""
        if batch is None:
            sums = [p.sum() for p in self.parameters() if p.requires_grad]
            return torch.stack([each.to(sums[0].device) for each in sums]).sum() * 0
        # autocast is here, so that every replica has it
        with autocast(self._precision, self._device_type), devices_explained(self.model):
            loss = checked_loss(self._task.loss(self.model, batch))
        return loss.float() if loss.dtype in (torch.bfloat16, torch.float16) else loss


class Share(nn.Module):
    """What `nn.DataParallel` copies to each GPU: the loss of its share of a micro-batch, times the samples in it.

    So only numbers come back to the first GPU, whose memory is no more in demand than the others'; and shares that are
    not equal count for what they are.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, batch: Any) -> Tensor:
        """The sum over samples, of shape [1]."""
        loss: Tensor = self.loss(batch)
        return (loss * samples_in(batch)).reshape(1)


class Parallel(nn.DataParallel[Share]):
    """The mean loss of a micro-batch that is divided among the devices of one process. It may come from the host.

    Args:
        loss: on the first device.
        devices: several GPUs.
    """

    def __init__(self, loss: Loss, devices: Sequence[torch.device]) -> None:
        super().__init__(Share(loss), device_ids=[device.index for device in devices])
        self.devices = devices

    def forward(self, batch: Any) -> Tensor:
        """As of `Loss`; never for None, for a process that is alone is not idle."""
        total: Tensor = super().forward(batch)
        return total.sum() / samples_in(batch)

    def scatter(self, inputs: Any, _kwargs: Any, _device_ids: Any) -> tuple[list[Any], list[Any]]:
        """As `nn.DataParallel` does it, for batches of all kinds."""
        (batch,) = inputs
        parts = divide(batch, chunks(samples_in(batch), len(self.devices)))
        moved = [(to_device(part, device),) for part, device in zip(parts, self.devices, strict=False)]
        for number, device in enumerate(self.devices[: len(moved)]):  # or all would draw the same dropout
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derive(torch.initial_seed(), "replica", number))
        return moved, [{}] * len(moved)


class Gradients:
    """Computes the gradient of each step of a run.

    DDP starts by giving every rank the weights of rank 0.

    Args:
        task: its loss.
        state: the model in it; steps change nothing of it but ``.grad``.
        world: who takes part.
        plan: how steps are cut into micro-batches.
        seed: the run's seed; each micro-batch draws its own random numbers (dropout) from it.
        reduce: "ring": the stock all-reduce; "tree": the same bits on any number of ranks.
        precision: of the loss and its backward pass.
        strategy: "ddp", or "dp": one process divides each micro-batch among all its GPUs.
    """

    def __init__(
        self,
        task: Task,
        state: State,
        world: World,
        plan: Plan,
        seed: int = 0,
        reduce: Literal["ring", "tree"] = "ring",
        precision: Precision = "fp32",
        strategy: Literal["ddp", "dp"] = "ddp",
    ) -> None:
        self.state, self.world, self.plan, self.seed = state, world, plan, seed
        self._task = task
        self._learning = [p for p in state.parameters if p.requires_grad]
        unused = task.unused_parameters
        self.reduction: Reduction = Tree(state.model, world, unused) if reduce == "tree" else Ring(world)
        self.wrapped = wrap(state.model, task, world, self.reduction, precision, strategy)
        self.numel = 1 + state.buffers.numel
        """Numbers that a micro-batch says besides the gradient: loss and changes of the buffers."""
        self._transfer = Transfer(world.device)
        self._peers = peers_of(state.model)
        if self._peers:
            counts = [_at_work(plan.runs(step, world.world_size)) for step in (0, plan.steps_per_epoch - 1)]
            # where ranks use other parameters, their buckets are full at other times, and to wait would be a dead-lock
            self._peers.connect(counts, None if unused else self.reduction.catch_up)

    def of_step(self, step: int, micro_batches: Sequence[MicroBatch], batches: Iterable[Any]) -> "Step":
        """Compute and add up the gradient of a step; afterwards every rank holds it in ``.grad``.

        Args:
            step: its global number. Gradients have been cleared.
            micro_batches: this rank's share of it; may be empty.
            batches: their data, in the same order.
        """
        runs = self.plan.runs(step, self.world.world_size)
        try:
            small = self._passes(step, micro_batches, batches, runs)
        except BaseException:
            self.state.buffers.rewind()
            raise
        if self.state.scaler:
            self.state.scaler.unscale(self.state.parameters)
        return Step(self, small)

    def _passes(
        self, step: int, micro_batches: Sequence[MicroBatch], batches: Iterable[Any], runs: Sequence[range]
    ) -> Fold[Tensor]:
        """The forward and backward passes of a step, and the reduction; returns what else the micro-batches say."""
        small = Fold[Tensor](lambda left, right: right.add_(left))
        activity.enter(DATA)
        self.reduction.begin(runs)
        if self._peers:
            self._peers.begin(_at_work(runs))
        batch: Any = None
        try:
            for number, (micro_batch, batch) in enumerate(zip(micro_batches, batches, strict=True), start=1):
                last = number == len(micro_batches)
                activity.enter(COMPUTING)
                seed_computation(derive(self.seed, "micro-batch", step, micro_batch.id), self.world.devices)
                weight = micro_batch.size / self.plan.step_samples(step)
                with nullcontext() if last else self._no_reduction():
                    loss = self.wrapped(self._placed(batch))
                    part = loss.detach() * weight
                    if last:
                        activity.enter(REDUCTION)
                    # weight and scale, or NaN where the loss is not finite: its gradient might be, and all ranks must
                    # hear it
                    loss.backward(self._scale(loss.device) * weight + 0 * part)
                small.push(Node(0, micro_batch.id), self._collect(part, weight))
                if not last:
                    self.reduction.keep(micro_batch.id)
                activity.enter(DATA)
            activity.enter(REDUCTION)
            if not micro_batches and self.reduction.hooked:
                self.wrapped(None).backward()
            self.reduction.end()
            if not (self._task.unused_parameters or self._has_all()):
                raise missing_gradients(self.state.model)
        except Exception as error:
            note_batch(error, batch)
            explain(error, self.state.model)
            raise
        return small

    def _has_all(self) -> bool:
        """Whether all that learns has a gradient, and DDP has reduced it: one may be an earlier micro-batch's alone.

        Asked in each step, so without a walk through the model.
        """
        reduced = self.reduction.complete or not isinstance(self.wrapped, DistributedDataParallel)
        return reduced and all(parameter.grad is not None for parameter in self._learning)

    def _scale(self, device: torch.device) -> Tensor | float:
        """What the loss is multiplied by for the backward pass."""
        return self.state.scaler.scale.to(device) if self.state.scaler else 1.0

    def _collect(self, loss: Tensor, weight: float) -> Tensor:
        """What else a micro-batch says, flat and in float64: its weighted loss and the changes of the buffers. Puts
        these back to the step's start for the next one."""
        parts = [loss.double().reshape(1), *self.state.buffers.take_changes(weight)]
        return torch.cat([part.to(self.world.device) for part in parts]) if len(parts) > 1 else parts[0]

    def _placed(self, batch: Any) -> Any:
        return batch if isinstance(self.wrapped, Parallel) else self._transfer(batch)

    def _no_reduction(self) -> AbstractContextManager[None]:
        """Let gradients add up on this rank: DDP reduces in the last backward pass of a step only."""
        return self.wrapped.no_sync() if isinstance(self.wrapped, DistributedDataParallel) else nullcontext()


class Step:
    """What a step has computed and not yet committed, besides the gradients. All ranks must ask for the same."""

    def __init__(self, gradients: Gradients, small: Fold[Tensor]) -> None:
        self._of, self._small = gradients, small
        self._total: Callable[[], Tensor] | None = None
        if gradients.state.buffers.numel or gradients.state.scaler:
            self._begin()  # beside the norm of the gradient; never earlier, for a backward pass may move buffers too

    @property
    def loss(self) -> Tensor:
        """The mean loss of the global batch, a scalar on the device. Not read here: that would make the host wait."""
        return self._sums[0]

    @property
    def judge(self) -> Tensor | None:
        """The loss, where a loss scale is judged by it. None elsewhere, for it may cost an exchange."""
        return self.loss if self._of.state.scaler else None

    @property
    def buffers(self) -> list[Tensor]:
        """New values of the model's buffers, flat, for each of its groups: moved by the mean change over all
        micro-batches of all ranks."""
        buffers = self._of.state.buffers
        # without any, nothing is exchanged
        return buffers.moved_by(self._sums[1 : 1 + buffers.numel]) if buffers.numel else []

    def _begin(self) -> Callable[[], Tensor]:
        if self._total is None:
            self._total = self._of.reduction.sum_small(self._small, self._of.numel)
        return self._total

    @cached_property
    def _sums(self) -> Tensor:
        return self._begin()()


def parallel(model: nn.Module, task: Task, world: World, precision: Precision, strategy: str) -> Loss | Parallel:
    """The model with its loss, as one process computes it: on one device, or by `nn.DataParallel` on several."""
    devices, loss = replicas(strategy, world.device), Loss(model, task, precision)
    return loss if len(devices) == 1 else Parallel(loss, devices)


def wrap(
    model: nn.Module,
    task: Task,
    world: World,
    reduction: Reduction,
    precision: Precision = "fp32",
    strategy: Literal["ddp", "dp"] = "ddp",
) -> nn.Module:
    """The model with its loss, under DDP where that has the gradients reduced."""
    module = parallel(model, task, world, precision, strategy)
    if not world.launched or strategy == "dp":
        return module
    if not reduction.hooked:
        model.load_state_dict(world.broadcast_tensors(model.state_dict()))  # as DDP begins
        return module
    # no `device_ids`, for which it would make batches anew, and mappings or lists of their own kind into plain ones
    ddp = DistributedDataParallel(
        module,
        gradient_as_bucket_view=True,
        find_unused_parameters=task.unused_parameters,
        **{_BUFFER_OPTION: False},  # type: ignore[arg-type]  # `Step.buffers` keeps them equal
    )
    ddp.register_comm_hook(None, reduction.hook)
    # After its first backward pass DDP sorts parameters into buckets anew, and where a gradient stands in its bucket
    # decides in which order a ring adds the ranks' parts. Were that pass a real step, the steps after a resume would
    # differ in the last bits from those of a run that never stopped; so it is an empty one.
    ddp(None).backward()
    ddp.zero_grad(set_to_none=True)
    return ddp


def clip(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradient down to a 2-norm of at most ``max_norm`` (0: leave it as it is).

    Args:
        parameters: all of the model's.
        max_norm: 0, or the most that the norm may be.

    Returns:
        The norm before, a scalar on the device, the same on every rank.
    """
    parameters = list(parameters)
    norm = get_total_norm([_aligned(p.grad) for p in parameters if p.grad is not None])
    if max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _aligned(gradient: Tensor) -> Tensor:
    """A gradient, or a copy of one on a GPU that does not begin at a multiple of 16 bytes, as in DDP's bucket it may:
    the squares of such a one are added up in another order."""
    return gradient.clone() if gradient.is_cuda and gradient.data_ptr() % 16 else gradient


def _at_work(runs: Sequence[range]) -> int:
    """Ranks that have a micro-batch; they are the first ones."""
    return sum(map(bool, runs))

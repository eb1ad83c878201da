"""The gradient of one step: the mean over the global batch, whichever rank computes which part.

Each micro-batch contributes (its samples / the step's samples) x (its mean loss). So uneven shares and a short last
step need no special case: a plain sum over micro-batches and ranks is the gradient of the mean over the step's samples.
`distributed.reduction` decides the order of that sum.

Stock DDP gets two things wrong for an elastic job. A rank without a micro-batch would wait forever; here it takes part
with an exact zero. And BatchNorm's running statistics would be rank 0's; here each micro-batch starts from the step's
statistics, and the step adds the mean of all micro-batches' changes. The reduction adds up these and the loss too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..common.errors import Ended, seen_at
from ..common.phases import COMPUTING, DATA, REDUCTION, activity
from ..common.user_code import no_broadcast
from ..config import Config
from ..data.plan import MicroBatch, Plan
from ..data.randomness import derive, seed_computation
from ..data.sampler import Step
from ..distributed.data_parallel import Parallel, parallel
from ..distributed.reduction import AllReduce, Reduction, TreeReduction
from ..distributed.sync_batchnorm import peers_of
from ..distributed.transfer import Transfer
from ..distributed.world import World
from .arrivals import BACKWARD, FORWARD, LOADING, WAITING, Arrivals
from .balance import Balance
from .checks import TWICE, check_dense, missing_gradients, raise_explained, same_parts, wrong_backward, wrong_step
from .loss import LossFunction, ModelWithLoss
from .oom import note_batch
from .optimization import clip_grad_norm
from .side_effects import SideEffects
from .state import State
from .step_sums import Pass, StepSums
from .whole_batch import WholeBatch

_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"  # newer releases of torch warn about the old name
_BUFFER_OPTION = _NEW if _NEW in inspect.signature(DistributedDataParallel).parameters else _OLD


class DistributedLoss:
    """The model and its loss on all ranks: call it with a batch, and call :meth:`backward` with the result.

    One step as in `train.py`, here in one process:

    >>> state, plan = State(nn.Linear(2, 1), []), Plan(samples=8, global_batch=8, micro_batch=4, epochs=1)
    >>> alone = World(0, 0, 1, 1, torch.device("cpu"), launched=False)
    >>> model = DistributedLoss(lambda network, batch: network(batch).mean(), state, alone, plan)
    >>> for batch in model.micro_batches(Step(0, plan.micro_batches(0), iter(torch.ones(2, 4, 2)))):
    ...     loss = model(batch)
    ...     model.backward(loss)
    >>> model.step(clip_grad_norm(state.parameters, max_norm=1.0))
    >>> state.step
    1

    Args:
        loss: (model, batch) -> the batch's mean loss, a scalar; a task's `loss`. Or a `WholeBatch`.
        state: has the model; only :meth:`step` changes more of it than ``.grad``.
        world: the ranks.
        plan: how steps are cut into micro-batches.
        config: the seed (each micro-batch draws its own random numbers from it), and how gradients are computed and
            added up: `reduce`, `reduce_dtype`, `precision`, `strategy`.
        unused_parameters: some parameters get no gradient in some steps.
        network: the part of the model that learns from this loss; default: all of it. With several losses, networks
            take turns, a step for each.
        arrivals: times the steps of this rank; default: they are not timed.
        collectives: the loss may call collectives.
        balance: how many micro-batches each rank computes; default: equally many.
    """

    def __init__(
        self,
        loss: LossFunction,
        state: State,
        world: World,
        plan: Plan,
        config: Config | None = None,
        *,
        unused_parameters: bool = False,
        network: nn.Module | None = None,
        arrivals: Arrivals | None = None,
        collectives: bool = False,
        balance: Balance | None = None,
    ) -> None:
        config = config or Config()
        dp = config.strategy == "dp"
        self._synced = peers_of(state.model)
        if network and (self._synced or dp or state.sharding):
            raise Ended("--strategy dp, --shard and --sync-batchnorm are not for networks that take turns")
        self.state, self.world, self.plan, self.seed = state, world, plan, config.seed
        self._balance = balance
        self._unused_parameters = unused_parameters
        self._network = network or state.model
        self._learning = [p for p in self._network.parameters() if p.requires_grad]
        learning = set(map(id, self._learning))
        self._others = [p for p in state.parameters if id(p) not in learning]
        self.reduction = self._build_reduction(config, collectives)
        self._whole_batch = loss if isinstance(loss, WholeBatch) else None
        unused = unused_parameters and not dp
        self._loss = ModelWithLoss(state.model, loss, config.precision, network, unused, collectives)
        module = parallel(self._loss, config.strategy, world.device)
        self.module = module if dp else _wrap(module, self._network, world, self.reduction, unused_parameters)
        self._transfer = Transfer(world.device)
        self._arrivals = arrivals or Arrivals()
        self.reduction.on_last_bucket = partial(self._arrivals.lap, BACKWARD)
        if self._synced:  # with --sync-batchnorm: the layers that exchange statistics
            steps = (0, plan.steps_per_epoch - 1)
            busy_ranks = [sum(map(bool, plan.shares(step, world.world_size))) for step in steps]
            # ranks that use different parameters fill their buckets at different times, and waiting would deadlock
            self._synced.connect(busy_ranks, None if unused_parameters else self.reduction.catch_up)
        self.norm = torch.zeros(())
        """The gradient's norm in the last step."""
        self._side_effects = SideEffects(state, loss, not config.verify_every, self._network)
        self._pass = Pass(None, MicroBatch(0, 0, 0, 0), 0.0)  # of the present micro-batch, or the last one
        self._sums = StepSums(self.reduction, state.buffers, world.device)  # of the present step
        self._has_gradient = False  # whether it has its gradient, and `step` may come

    def micro_batches(self, step: Step) -> Iterator[Any]:
        """The batches of this rank's micro-batches, on its device; none on an idle rank, which takes part with zeros.

        Pass each through the model and :meth:`backward` before taking the next, to the end: only then do all ranks add
        up, and every rank has the gradient of the global batch in ``.grad``.

        The loop's body runs at the `yield`: what follows it runs when the loop asks for the next batch.
        """
        shares = self._begin_step(step)
        with self._explained():
            batches = self._embedded(self._whole_batch, step, shares) if self._whole_batch else step.batches
            for number, (micro_batch, batch) in enumerate(zip(step.micro_batches, batches, strict=True), start=1):
                on_device = self._begin_pass(micro_batch, batch, last := number == len(step.micro_batches))
                with nullcontext() if last else self._no_reduction():
                    yield on_device
                self._finish_pass(micro_batch)
            self._finish_reduction(step)
            self._check_gradients()
        self._end_step()

    def __call__(self, batch: Any) -> Tensor:
        """The mean loss of a micro-batch, a scalar."""
        with self._explained(), no_broadcast() if self._first_step else nullcontext():
            return self._pass.loss_of(self.module(batch))

    def backward(self, loss: Tensor) -> None:
        """Add the micro-batch's part to the gradient of the global batch: its samples / the step's samples.

        The last micro-batch's pass also reduces the gradients over all ranks.
        """
        self._arrivals.lap(FORWARD)
        self._pass.backward_calls += 1
        self._pass.contribution = loss.detach() * self._pass.weight
        factor = self._gradient_factor(self._pass)
        if self._pass.last:
            activity.enter(REDUCTION)
        with self._explained():
            loss.backward(factor)  # type: ignore[no-untyped-call]

    def step(self, norm: Tensor | None = None) -> None:
        """Take the optimizers' step, unless the gradient is not finite. Afterwards all ranks have the same state.

        Args:
            norm: the gradient's norm, from `clip_grad_norm`; None: it is computed here, and nothing is clipped.
        """
        if not self._has_gradient:
            raise wrong_step()
        self._has_gradient = False
        self.norm = norm = clip_grad_norm(self.state.parameters, 0.0) if norm is None else norm
        if hasattr(norm, "full_tensor"):
            raise Ended(
                "--shard: this norm, of torch's clip_grad_norm_, depends on the number of ranks; use the one of "
                "evenkeel: norm = clip_grad_norm(run.state.parameters, 1.0)"
            )
        if self.state.task_state:
            self.state.task_state.check()
            named = zip(("loss", *(self._sums.part_names or ())), self._sums.total().tolist(), strict=False)
            self.state.task_state.losses = dict(named)
        self._side_effects.check_buffers(self._sums.total)
        self.state.commit(norm, self._sums.new_buffers(), self.loss if self.state.scaler else None)

    @property
    def loss(self) -> Tensor:
        """The mean loss of the global batch, a scalar on the device. All ranks must read this property, because it may
        exchange data. The value is not copied to the host, which would have to wait."""
        return self._sums.total()[0]

    @property
    def parts(self) -> dict[str, Tensor]:
        """The parts of the loss by name, as :attr:`loss`."""
        return dict(zip(self._sums.part_names or (), self._sums.total()[1:], strict=False))

    @property
    def last_micro_batch(self) -> tuple[Any, int]:
        """This rank's last batch, as it was loaded, and its samples; (None, 0) before the first."""
        return self._pass.batch, self._pass.micro_batch.size

    def parameters(self) -> list[nn.Parameter]:
        """All of the model's parameters, for torch's `clip_grad_norm_`."""
        return self.state.parameters

    def _build_reduction(self, config: Config, collectives: bool) -> Reduction:
        if self.state.sharding:
            return self.state.sharding.reduction
        if config.reduce == "tree":
            return TreeReduction(self._network, self.world, self._unused_parameters, collectives)
        return AllReduce(self.world, config.reduce_dtype == "bf16")

    def _begin_step(self, step: Step) -> tuple[range, ...]:
        """Prepare for the micro-batches of a step; returns each rank's share."""
        self.state.clear_gradients()
        self._has_gradient = False
        self._loss.step = step.number
        self._sums = StepSums(self.reduction, self.state.buffers, self.world.device, self._sums.part_names)
        per_rank = self._balance.per_rank if self._balance else ()
        shares = self.plan.shares(step.number, self.world.world_size, per_rank)
        self._side_effects.record(sum(map(len, shares)))
        self._arrivals.begin_step(step.micro_batches)
        with self._explained():
            activity.enter(DATA)
            self.reduction.begin_step(shares)
            if self._synced:
                self._synced.select(sum(map(bool, shares)))
        return shares

    def _end_step(self) -> None:
        """Leave in ``.grad`` what :meth:`step` takes, and begin to add up what else it needs."""
        for parameter in self._others:  # of networks that do not learn in this step
            parameter.grad = None
        if self.state.scaler:
            self.state.scaler.unscale(self.state.parameters)
        if self.state.buffers.numel or self.state.scaler or self.state.task_state:
            self._sums.begin_total()  # while the norm is computed; not earlier: a backward pass may change buffers too
        self._has_gradient = True

    def _begin_pass(self, micro_batch: MicroBatch, batch: Any, last: bool) -> Any:
        """Begin a pass of a micro-batch: seed its random numbers; returns its batch on the device."""
        self._pass = self._pass_of(micro_batch, batch, last)
        activity.enter(COMPUTING)
        seed_computation(derive(self.seed, "micro-batch", self._loss.step, micro_batch.id), self.world.devices)
        on_device = batch if isinstance(self.module, Parallel) else self._transfer(batch)
        self._arrivals.lap(LOADING)
        return on_device

    def _pass_of(self, micro_batch: MicroBatch, batch: Any, last: bool = False) -> Pass:
        return Pass(batch, micro_batch, micro_batch.size / self.plan.step_samples(self._loss.step), last)

    def _embedded(self, whole: WholeBatch, step: Step, shares: tuple[range, ...]) -> Iterator[Any]:
        """Embed all samples for a whole-batch loss, and yield the batches again, for the second pass."""

        def first_pass(micro_batch: MicroBatch, batch: Any) -> dict[str, Tensor]:
            on_device = self._begin_pass(micro_batch, batch, last=False)  # it reduces nothing
            with self._loss.computing("embed()") as model:
                found = whole.embed(model, on_device, micro_batch.size)
            self.state.buffers.rewind()
            self._arrivals.lap(FORWARD)
            return found

        batches = whole.embed_all(step, shares, self.plan, self.world, self.seed, first_pass)
        self._arrivals.lap(WAITING)
        return batches

    def _gradient_factor(self, this: Pass) -> Tensor:
        """The factor on the gradient of a micro-batch's loss: its part of the step's samples, times the loss scale.
        NaN if the loss is not finite, because its gradient might be finite all the same, and all ranks must notice."""
        scale = self.state.scaler.scale.to(this.contribution.device) if self.state.scaler else 1.0
        weight = 1.0 if self._whole_batch else this.weight  # a whole-batch loss has its weight already
        return scale * weight + 0 * this.contribution

    def _finish_pass(self, micro_batch: MicroBatch) -> None:
        """Add what its passes have found to the step's sums."""
        if self._pass.backward_calls != 1:
            raise wrong_backward(self._pass.backward_calls)
        summands = self._summands()
        # with --shard an idle rank repeats another's micro-batch, which must not count twice
        if not self.reduction.repeats(micro_batch.id):
            self._sums.add(micro_batch.id, summands)
        if not self._pass.last:
            self.reduction.accumulate(micro_batch.id)
        if not (self._pass.last and self.reduction.ddp_reduces):  # else the hook marks it
            self._arrivals.lap(BACKWARD)
        activity.enter(DATA)

    def _summands(self) -> Tensor:
        """What the present micro-batch adds to the step's sums; `VerifiedLoss` takes a digest of it."""
        return self._sums.summands(self._pass)

    def _finish_reduction(self, step: Step) -> None:
        activity.enter(REDUCTION)
        if not step.micro_batches and self.reduction.ddp_reduces:
            self.module(None).backward()  # an idle rank's exact zero, see `ModelWithLoss`
        self.reduction.end()

    def _check_gradients(self) -> None:
        """Check what the passes have left in ``.grad``, and in the first step agree on the parts of the loss."""
        self._side_effects.check()
        if not (self._unused_parameters or self._has_all()):
            with seen_at(self._loss.function):
                raise missing_gradients(self._network)
        if self._first_step:
            check_dense(self._learning)
            self._agree_on_parts()

    @property
    def _first_step(self) -> bool:
        return self._sums.part_names is None  # at its end all ranks agree on them

    def _agree_on_parts(self) -> None:
        """Exchange the names of the loss's parts: a rank without a micro-batch knows none."""
        known = [names[0] for names in self.world.all_gather(self._loss.seen_part_names) if names]
        for names in known:
            same_parts(known[0], names, Ended)
        self._sums.part_names = known[0] if known else None
        self._loss.seen_part_names[:] = known[:1]

    def _has_all(self) -> bool:
        """Whether all learning parameters have a reduced gradient; under DDP `.grad` may be an older one."""
        reduced = self.reduction.all_buckets_ready or not isinstance(self.module, DistributedDataParallel)
        return reduced and all(parameter.grad is not None for parameter in self._learning)

    def _no_reduction(self) -> AbstractContextManager[None]:
        """A context in which gradients add up on this rank: DDP reduces only in a step's last backward pass."""
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A context that raises a known mistake in one line, and attaches the batch to an out-of-memory error."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # a replaced buffer or a lost GPU must not hide this error
                self.state.buffers.rewind()
            note_batch(error, self._pass.batch, micro_batch=self._pass.micro_batch)
            with seen_at(self._loss.function) if TWICE in str(error) else nullcontext():
                raise_explained(error, self._network)
            raise


def _wrap(module: nn.Module, network: nn.Module, world: World, reduction: Reduction, unused: bool) -> nn.Module:
    """The model with its loss, wrapped in DDP if DDP reduces the gradients."""
    if not world.launched or reduction.by_fsdp:
        return module
    if not reduction.ddp_reduces:
        network.load_state_dict(world.broadcast_tensors(network.state_dict()))  # as DDP does
        return module
    # no `device_ids`: with them it would rebuild batches, and turn custom mappings or lists into plain ones
    ddp = DistributedDataParallel(
        module,
        gradient_as_bucket_view=True,
        find_unused_parameters=unused,
        **{_BUFFER_OPTION: False},  # type: ignore[arg-type]  # `DistributedLoss.step` keeps them equal
    )
    ddp.register_comm_hook(None, reduction.hook)
    # After its first backward pass DDP sorts parameters into new buckets, and the position of a gradient in its bucket
    # decides the order in which a ring adds the ranks' parts. If that pass were a real step, the steps after a resume
    # would differ in the last bits from those of an undisturbed run; so it is an empty one.
    ddp(None).backward()
    ddp.zero_grad(set_to_none=True)
    return ddp

"""BatchNorm over the whole global batch.

torch's SyncBatchNorm runs on GPUs only and mixes the micro-batches that are computed at the same time. Here the
statistics are those of all samples of a step, as with plain BatchNorm on one process with the whole batch. So each
micro-batch of a step needs its own rank. Ranks exchange mean, sum of squared deviations and count, and combine them in
the order of micro-batches; with `--reduce tree` the bits are the same on any number of ranks that is large enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..common.errors import Refusal
from ..data.plan import Plan
from .collectives import no_collectives
from .world import World


class BusyRanks:
    """The ranks with a micro-batch in the present step; all layers of a model share one."""

    def __init__(self) -> None:
        self.count = 1
        self.group: Any = None
        self._groups: dict[int, Any] = {}
        self._catch_up: Callable[[], None] | None = None

    def connect(self, counts: Sequence[int], catch_up: Callable[[], None] | None = None) -> None:
        """Make the process groups. All ranks must call it.

        Args:
            counts: the numbers of ranks with a micro-batch, over all kinds of steps.
            catch_up: called before each collective, to wait for those of other groups.
        """
        self._catch_up = catch_up
        for count in sorted(set(counts)):
            # never the default group, which the reduction uses at the same time, from a thread of its own; for a day,
            # because torch's timeout of 10 or 30 minutes might come before the watch for hangs, and explains nothing
            self._groups[count] = dist.new_group(range(count), timeout=timedelta(days=1)) if count > 1 else None

    def select(self, count: int) -> None:
        """Select the ranks of a step in which this many have a micro-batch."""
        self.count, self.group = count, self._groups.get(count)

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return the tensors of all peers, stacked in the order of ranks."""
        if self._catch_up:
            self._catch_up()
        everyone = [torch.empty_like(mine) for _ in range(self.count)]
        with no_collectives(""):  # this one is exact
            dist.all_gather(everyone, mine.contiguous(), group=self.group)
        return torch.stack(everyone)


def refuse_too_few_ranks(plan: Plan, world_size: int) -> None:
    """Refuse a cut in which a rank would have more than one micro-batch."""
    if world_size >= plan.micro_batches_per_step:
        return
    enough = -(-min(plan.global_batch, plan.samples) // world_size)
    raise Refusal(
        f"--sync-batchnorm: a step has {plan.micro_batches_per_step} micro-batches of {plan.micro_batch} samples, and "
        f"each needs its own rank, but there {'are' if world_size > 1 else 'is'} only {world_size}; start "
        f"{plan.micro_batches_per_step} ranks, or a new run with --micro-batch {enough}"
    )


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of the global batch in training; plain BatchNorm in evaluation."""

    peers: BusyRanks

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel, the second dimension."""
        if not self.training or self.peers.count == 1:
            return super().forward(x)
        total, mean, variance = self._statistics(x.detach())
        self._track(total, mean, variance)
        of_channel = [1, -1] + [1] * (x.dim() - 2)
        wide = _wide(x)
        parts = (wide, mean.to(wide).view(of_channel), (variance + self.eps).rsqrt().to(wide).view(of_channel))
        normalised: Tensor = _Normalise.apply(*parts, total, self.peers)
        if self.affine:
            normalised = normalised * self.weight.view(of_channel) + self.bias.view(of_channel)
        return normalised.to(x.dtype)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count, and each channel's mean and biased variance, over all peers, in float64 (Chan, Golub and LeVeque,
        "Algorithms for computing the sample variance", 1983)."""
        own_variance, own_mean = (value.double() for value in torch.var_mean(_wide(x), _but_channels(x), correction=0))
        number = x.numel() // x.shape[1]
        gathered = self.peers.all_gather(torch.cat([own_mean, own_variance * number, own_mean.new_full((1,), number)]))
        means, squares, counts = torch.split(gathered, [len(own_mean), len(own_mean), 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        return total, mean, (squares + counts * (means - mean).square()).sum(0) / total

    @torch.no_grad()
    def _track(self, total: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics as BatchNorm does, with the unbiased variance."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        part = self.num_batches_tracked.double().reciprocal() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance * total / (total - 1))):
            running.copy_(running.double() * (1 - part) + new * part)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs samples and channels, and got {input.dim()} dimensions")


class _Normalise(torch.autograd.Function):
    """(x - mean) * scale, both statistics of the x of all peers; the gradient goes through these too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, total: Tensor, peers: BusyRanks) -> Tensor:
        normalised = (x - mean) * scale
        ctx.save_for_backward(normalised, scale, total)
        ctx.peers = peers
        return normalised

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normalised, scale, total = ctx.saved_tensors
        rest = _but_channels(gradient)
        own = torch.stack([gradient.sum(rest), (gradient * normalised).sum(rest)])
        both = ctx.peers.all_gather(own.double()).sum(0) / total
        mean, along = (value.to(gradient).view_as(scale) for value in both)
        return scale * (gradient - mean - normalised * along), None, None, None, None


def _but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def synchronise(
    model: nn.Module, plan: Plan, world: World, reduce: str = "ring", unused_parameters: bool = False
) -> None:
    """Give a model's BatchNorm layers the statistics of the global batch, in place; state dict names do not change.

    Raises:
        Refusal: there are too few ranks or no BatchNorm layers; or one is of another class without a class attribute
            `synchronised`, a subclass of SyncBatchNorm to replace it; or collectives might dead-lock on GPUs, with
            --reduce tree or where ranks may use different parameters (`unused_parameters`).
    """
    # two NCCL communicators would then be fed in an order that may differ between ranks
    if "nccl" in world.backend and (reduce == "tree" or unused_parameters):
        other = "--reduce tree" if reduce == "tree" else "a task's unused_parameters"
        raise Refusal(f"--sync-batchnorm: may dead-lock on GPUs with {other}; leave one of them out")
    layers = [(module, _kind(module, name)) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if not layers:
        raise Refusal("--sync-batchnorm: the model has no BatchNorm layer; leave it out")
    refuse_too_few_ranks(plan, world.world_size)
    peers = BusyRanks()
    for layer, kind in layers:
        layer.__class__ = kind  # keeps hooks and references to the layer
        synced: Any = layer
        synced.peers = peers


def _kind(layer: nn.Module, name: str) -> type[SyncBatchNorm]:
    """The class that replaces a BatchNorm layer's."""
    own = type(layer)
    if own in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        return SyncBatchNorm
    # not inherited: a subclass may compute something else than its base class
    found = own if isinstance(layer, SyncBatchNorm) else vars(own).get("synchronised")
    if not (isinstance(found, type) and issubclass(found, SyncBatchNorm)):
        raise Refusal(
            f"--sync-batchnorm: {name or 'the model'} is a {own.__name__}, a custom BatchNorm, which would "
            "use the statistics of its micro-batch; use nn.BatchNorm1d, 2d or 3d there, or leave --sync-batchnorm out"
        )
    return found


def peers_of(model: nn.Module) -> BusyRanks | None:
    """The object that the synchronised layers of a model share; None without such layers."""
    return next((module.peers for module in model.modules() if isinstance(module, SyncBatchNorm)), None)

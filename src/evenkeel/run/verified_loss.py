"""The loss of a run with `--verify-every`: keeps what a rank's first micro-batch contributes, asks before a commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..data.plan import MicroBatch
from ..data.randomness import derive, generators_kept, seed_computation
from ..data.sampler import Step
from ..training.digest import bit_sum, on_host
from ..training.distributed_loss import DistributedLoss
from ..training.loss import LossFunction
from ..training.whole_batch import cloned
from .bit_flips import BitFlips

Given = tuple[MicroBatch, Any] | None
"""A micro-batch and its batch; None: of a rank that idles."""

REST = "loss and statistics"
"""What stands beside the names of parameters: the losses, and the changes of BatchNorm's statistics."""


class Verifier(Protocol):
    """Decides over steps; see `Verification`."""

    def verifies(self, step: int) -> bool:
        """Whether this step, counted from 0, is compared."""

    def approves(self, model: VerifiedLoss, step: int) -> bool:
        """Whether the step may be committed."""


class VerifiedLoss(DistributedLoss):
    """A `DistributedLoss` whose steps are compared before they are committed.

    Args:
        verification: compares them.
        loss, more: of a `DistributedLoss`.

    Attributes:
        kept: this rank's first micro-batch, in a step that is verified.
        mine: digests of what it contributes, still on the device.
    """

    def __init__(self, verification: Verifier, loss: LossFunction, *more: Any, **options: Any) -> None:
        super().__init__(loss, *more, **options)
        self._verification, self._flips = verification, BitFlips.planted(self.world.rank, self._learning)
        self._named_parameters = {id(p): name for name, p in self.state.model.named_parameters()}
        self._awaited = self._open = self._due = False
        self.kept: Given = None
        self.mine: dict[str, Tensor] = {}
        self.reduction.before_reduction = self._digest

    def micro_batches(self, step: Step) -> Iterator[Any]:
        """As of any loss."""
        self._awaited, self._due = True, self._verification.verifies(step.number)
        self.kept, self.mine = None, {}
        return super().micro_batches(step)

    def _begin_pass(self, micro_batch: MicroBatch, batch: Any, last: bool) -> Any:
        if self._awaited:
            self._awaited, self._open = False, True
            if self._flips:
                self._flips.begin(self._loss.step)
            if self._due:  # on the CPU a loss may change its batch
                self.kept = micro_batch, cloned(batch) if self.world.device.type == "cpu" else batch
        return super()._begin_pass(micro_batch, batch, last)

    def _digest(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Take digests of gradients before they are reduced, in the pass of the first micro-batch only."""
        if self._open and self._flips:
            self._flips.strike(parameters, gradients)
        if self._open and self._due:
            self.mine |= self._digests(parameters, gradients)

    def _summands(self) -> Tensor:
        summands = super()._summands()
        if self._open:
            if not (self._pass.last and self.reduction.ddp_reduces):  # otherwise the hook has done so
                self._digest(self._learning, [parameter.grad for parameter in self._learning])
            self._open = False
            if self._due:
                self.mine[REST] = bit_sum(summands)
        return summands

    def step(self, norm: Tensor | None = None) -> None:
        """Take the step, if all ranks agree; else nothing is committed, and the run yields the step again."""
        if self._verification.approves(self, self._loss.step):
            super().step(norm)
        else:
            self._sums.total()  # no exchange may be under way when the step begins again

    def compute_again(self, given: Given) -> dict[str, int]:
        """Compute any rank's micro-batch of the present step from the committed weights; returns its digests.

        ``.grad``, DDP and the generators stay as they are.
        """
        if given is None:
            return {}
        micro_batch, batch = given
        with generators_kept():
            seed_computation(derive(self.seed, "micro-batch", self._loss.step, micro_batch.id), self.world.devices)
            repeated = self._pass_of(micro_batch, batch)
            loss = repeated.loss_of(self._loss(self._transfer(cloned(batch))))
            repeated.contribution = loss.detach() * repeated.weight
            gradients = torch.autograd.grad(loss, self._learning, self._gradient_factor(repeated), allow_unused=True)
            summands = self._sums.summands(repeated)
        if self._flips:
            self._flips.strike(self._learning, gradients, again=True)
        return on_host(self._digests(self._learning, gradients) | {REST: bit_sum(summands)})

    def _digests(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> dict[str, Tensor]:
        """By names of parameters; a missing gradient counts as zeros, as DDP has them."""
        pairs = zip(parameters, gradients, strict=True)
        found = ((self._named_parameters[id(p)], torch.zeros_like(p) if it is None else it) for p, it in pairs)
        return {name: bit_sum(gradient.detach()) for name, gradient in found}

"""The evaluation of a task whose loss is over whole batches, and which has no metrics of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import seen_at
from ..common.phases import activity
from ..config import Config
from ..data.dataset import SizedDataset
from ..data.randomness import derive, seed_computation
from ..distributed.collectives import no_collectives
from ..distributed.world import World
from .checks import checked_embeddings, checked_losses, takes
from .evaluation import Evaluation
from .task import Task, defines
from .whole_batch import in_float32


def evaluation_of(
    task: Task, model: nn.Module, test_set: SizedDataset, config: Config, world: World, name: str
) -> Evaluation:
    """The evaluation of a task: of its metrics, or of its `batch_loss` if it has that and no metrics."""
    whole = defines(type(task), "batch_loss") and not defines(type(task), "metrics")
    kind = WholeBatchEvaluation if whole else Evaluation
    return kind(task, model, test_set, config, world, name)


class WholeBatchEvaluation(Evaluation):
    """The loss over the embeddings of each --batch-size test samples in their order: as many as in a step of the
    training, because a loss that compares samples is another quantity for another number of them.

    The last batch may be smaller. The result is the mean over batches, weighted by their samples, and the same on any
    number of ranks: all of them compute it from all embeddings.
    """

    def __init__(self, task: Task, model: nn.Module, test_set: SizedDataset, config: Config, *more: Any) -> None:
        super().__init__(task, model, test_set, config, *more)
        self._batch, self._compute = config.batch_size, task.embed

    def _sums(self) -> dict[str, list[Tensor]]:
        """The losses of this rank's samples alone, for the rehearsal."""
        return self._losses([self._embedded()])

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        sums = self._losses(self.world.all_gather(self._embedded()))
        return self._summary({name: torch.stack(values).sum(0) for name, values in sums.items()}, self.samples)

    def _embedded(self) -> dict[str, Tensor]:
        """The embeddings of this rank's samples by name, in order, on the CPU; {}: it has none."""
        rows: dict[str, list[Tensor]] = {}

        def add(found: Any, samples: int) -> None:
            with seen_at(self.task.embed):
                checked = checked_embeddings(found, samples)
            for name, value in checked.items():
                rows.setdefault(name, []).append(value.cpu())

        self._show_next = self.shows and self.world.rank == 0
        self.for_each_batch(self._measured, add)
        return {name: torch.cat(values) for name, values in rows.items()}

    def _losses(self, by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, list[Tensor]]:
        """For each batch of the samples of some ranks the loss and its parts, times the batch's samples, by name."""
        mine = [of_rank for of_rank in by_rank if of_rank]
        whole = {name: torch.cat([of_rank[name] for of_rank in mine]) for name in mine[0]}
        sums: dict[str, list[Tensor]] = {}
        for start in range(0, count := len(next(iter(whole.values()))), self._batch):
            end, device = min(start + self._batch, count), self.world.device
            part = {name: in_float32(value[start:end].to(device)) for name, value in whole.items()}
            seed_computation(derive(self.sampler.seed, f"batch_loss of {self.name}", start), self.world.devices)
            with no_collectives("batch_loss()"), seen_at(self.task.batch_loss):
                last = {"step": max(0, activity.step - 1)} if takes(self.task.batch_loss, "step") else {}
                found = self.task.batch_loss(part.get("", part), **last)
                loss, parts = checked_losses(found, trains=False, of="batch_loss()")
            for name, value in {"loss": loss, **parts}.items():
                sums.setdefault(name, []).append(value.double().cpu() * (end - start))
        return sums

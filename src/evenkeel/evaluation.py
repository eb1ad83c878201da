"""Exact evaluation: every test sample once, and the same result at any world size.

`DistributedSampler` pads the test set so that all ranks get equally many samples, which counts some twice. Here
ranks take unequal shares of fixed micro-batches. Nothing is exchanged until the end; then the sums of all
micro-batches come together once and are added in one order, whoever computed them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import data
from .activity import EVALUATION, activity
from .compilation import uncompiled
from .config import Config
from .devices import replicas
from .memory import note_batch
from .mistakes import check_metrics
from .plan import Plan, chunks
from .precision import autocast
from .randomness import derive, seed_computation, seed_task
from .tasks import Task
from .transfer import Transfer
from .world import World


class Evaluation:
    """A task's metrics over all test samples; call it as often as needed.

    Args:
        task: computes the metrics of a batch.
        model: the bare model or its average, because a DDP forward would wait for ranks that have no batch left.
        test_set: N samples, cut into micro-batches of the training's size, dealt to ranks in contiguous shares.
        config: micro-batch, loader workers, seed and precision.
        world: who takes part.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        test_set: data.SizedDataset,
        config: Config,
        world: World,
    ) -> None:
        self.task, self.model, self.world = task, model, world
        self.precision = config.precision
        self.samples = len(test_set)
        plan = Plan.of(config, self.samples)
        # one device evaluates, whose part in training is a share of the micro-batch
        micro_batch = chunks(plan.micro_batch, len(replicas(config.strategy, world.device)))[0]
        # the whole test set is one step of one epoch, in its own order
        self.sampler = data.ElasticSampler(
            test_set,
            self.samples,
            micro_batch,
            num_replicas=world.world_size,
            rank=world.rank,
            shuffle=False,
            seed=config.seed,
        )
        self._transfer = Transfer(world.device)
        self.batches = data.loader(test_set, self.sampler, "test", config.num_workers, world.device)

    def __call__(self) -> dict[str, float]:
        """The metrics, the same on every rank. The model is back in its mode afterwards."""
        with activity.during(EVALUATION):
            return self._evaluate()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        modes = [(module, module.training) for module in self.model.modules()]  # a part of it may be frozen
        self.model.eval()
        sums: dict[str, list[Tensor]] = {}
        for micro_batch, batch in zip(self.sampler.micro_batches(0), self.batches, strict=True):
            activity.enter(EVALUATION)  # again, because each batch is progress
            # a task's metrics may draw; what loading has drawn depends on the data set's kind and the loader processes
            seed_computation(derive(self.sampler.seed, "test", 0, micro_batch.start), self.world.devices)
            try:
                with autocast(self.precision, self.world.device.type), uncompiled():
                    of_samples = self.task.metrics(self.model, self._transfer(batch))
            except Exception as error:
                note_batch(error, batch)
                raise
            check_metrics(of_samples, micro_batch.size, sums)
            for name, values in of_samples.items():
                # float64 holds counts exactly, and a row for each micro-batch keeps one order of addition
                sums.setdefault(name, []).append(values.double().sum(0))
        for module, training in modes:
            module.training = training
        mine = {name: torch.stack(rows).cpu() for name, rows in sums.items()}
        shares = [share for share in self.world.gather(mine) if share] or [{}]
        rows = {name: torch.cat([share[name] for share in shares]) for name in shares[0]}
        seed_task(self.sampler.seed, "summarize")
        return self.task.summarize({name: values.sum(0) / self.samples for name, values in rows.items()})

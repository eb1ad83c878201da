"""The largest micro-batch that fits: found once when a run starts, by real passes over real samples.

A trial has in memory all that a step needs: the weights, the optimizers' state, a gradient and the activations that
forward stores for backward. Afterwards everything is restored: the run begins as if there had been no trial.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.errors import Ended
from ..common.memory import is_out_of_memory
from ..common.naming import name_ranks
from ..config import Config
from ..data.batch import to_device
from ..data.dataset import SizedDataset
from ..data.loader import make_loader
from ..data.order import positions_in
from ..data.randomness import derive, generators_kept, seed_computation
from ..data.sampler import ElasticSampler
from ..distributed.data_parallel import parallel
from ..distributed.world import World
from .evaluation import tensors_restored
from .loss import ModelWithLoss
from .oom import OutOfMemory, explained, next_smaller, note_batch
from .state import State
from .state_dicts import local_rows
from .task import Task

log = logging.getLogger(__name__)

RESERVE = 0.03
"""Share of a GPU's memory that must stay free: NCCL takes some, and free memory is fragmented."""


@dataclass
class Probe:
    """Finds the micro-batch of a run, with the samples of the first step. Call it once, on all ranks together.

    Each rank tries by itself. With --shard on the ranks exchange nothing meanwhile (`ShardedReduction.trial`).
    """

    config: Config
    """With --micro-batch auto."""
    task: Task
    world: World
    train_set: SizedDataset
    state: State
    """Model and optimizers at the start of the run; with --shard on divided already."""

    def __call__(self) -> tuple[int, str]:
        """The largest of --batch-size / world size, half of it, ... that fits on every rank; and a message about it.

        Raises:
            OutOfMemory: on the ranks where not even one sample fits.
        """
        # with more than its part of a batch another rank would have no work
        size = -(-min(self.config.batch_size, positions_in(self.train_set)) // self.world.world_size)
        failed: list[int] = []
        last: BaseException | None = None
        with _no_trace(self.state):
            while size:
                try:
                    last = self._try(size)
                except ValueError:
                    if not (last and size == 1):
                        raise
                    size = 0  # BatchNorm rejects one sample; the error reported is that two do not fit
                    break
                if last is None:
                    break
                failed.append(size)
                size = next_smaller(size, self.config.batch_size) if size > 1 else 0
        sizes = self.world.all_gather(size)
        found = min(sizes)
        if last is not None:
            raise OutOfMemory(explained(last, self.world.device, self.config)) from last
        if not found:
            raise Ended("--micro-batch auto: another rank does not have the memory for even one sample")
        bound = name_ranks([rank for rank, fits in enumerate(sizes) if fits == found])
        more = f", on {bound} no more" if max(sizes) > found else f", not {failed[-1]}" if failed else ""
        return found, f"--micro-batch auto: {found} samples fit{more}, tried with real ones; the run keeps that number"

    def _try(self, size: int) -> BaseException | None:
        """The out-of-memory error, if there is one, without its traceback, which would keep the memory in use."""
        failure: BaseException | None = None
        try:
            self._try_within(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)
            failure.__context__ = failure.__cause__ = None
            if self.state.sharding:
                self.state.sharding.recover()
        self.state.clear_gradients()
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
            for device in self.world.devices:
                torch.cuda.reset_peak_memory_stats(device)  # a later hint reads the peak
        return failure

    def _try_within(self, size: int) -> None:
        """A separate function, so that everything that takes memory is freed when it returns."""
        _held = self._reserve(size)
        config = self.config
        sampler = ElasticSampler(self.train_set, config.batch_size, size, num_replicas=1, rank=0, seed=config.seed)
        batch = next(iter(make_loader(self.train_set, sampler, "train", 0, self.world.device)))
        sharding = self.state.sharding
        try:
            with sharding.reduction.trial(self._micro_batches(size)) if sharding else nullcontext():
                self._two_passes(batch)
        except Exception as error:
            note_batch(error, batch)
            raise

    def _two_passes(self, batch: Any) -> None:
        """Like all steps but a run's first, the second has a gradient and the optimizers' state in memory."""
        loss = ModelWithLoss(self.state.model, self.task.loss, self.config.precision, collectives=self.task.collectives)
        module = parallel(loss, self.config.strategy, self.world.device)
        for number in range(2):
            seed_computation(derive(self.config.seed, "micro-batch", 0, 0), self.world.devices)
            placed = batch if self.config.strategy == "dp" else to_device(batch, self.world.device)
            found = module(placed)
            (found[0] if isinstance(found, tuple) else found).backward()
            if number == 0:
                for optimizer in self.state.optimizers:
                    optimizer.step()
                if self.state.sharding:  # its gradient is freed before each pass
                    self.state.clear_gradients()

    def _reserve(self, size: int) -> list[Tensor]:
        """The additional memory of a step with micro-batches of this size, allocated during a trial."""
        held = []
        for device in self.world.devices:
            if device.type == "cuda":
                whole = torch.cuda.get_device_properties(device).total_memory
                held.append(torch.empty(int(whole * RESERVE), dtype=torch.uint8, device=device))
        gradients = [p for p in self.state.model.parameters() if p.requires_grad]
        return held + [torch.empty_like(p) for p in gradients for _ in range(self._more_gradients(size))]

    def _micro_batches(self, size: int) -> int:
        """Of a step, with micro-batches of this size."""
        return -(-min(self.config.batch_size, positions_in(self.train_set)) // size)

    def _more_gradients(self, size: int) -> int:
        """Copies of the whole gradient that a step has at its peak, besides the one of a trial.

        DDP has one in its buckets. The tree has one for each bit of the number of this rank's micro-batches, and on
        several ranks two or three that it exchanges. With --shard on it has sums between two rounds, of this rank's
        rows only.
        """
        world_size, micro_batches = self.world.world_size, self._micro_batches(size)
        if self.state.sharding:
            return max((done.bit_count() for done in range(world_size, micro_batches, world_size)), default=0)
        levels = (-(-micro_batches // world_size) - 1).bit_length()
        if self.config.reduce == "ring":
            return int(world_size > 1)
        return levels + 3 if world_size > 1 else max(0, levels - 1)


@contextmanager
def _no_trace(state: State) -> Iterator[None]:
    """Restore weights, buffers, optimizers and generators afterwards, in every bit."""
    values = [tensor.detach().cpu().clone() for tensor in local_rows(state.parameters)]
    optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in state.optimizers]
    with generators_kept(), tensors_restored(state.model):
        try:
            yield
        finally:
            state.clear_gradients()
            with torch.no_grad():
                for tensor, value in zip(local_rows(state.parameters), values, strict=True):
                    tensor.copy_(value)
            for optimizer, saved in zip(state.optimizers, optimizers, strict=True):
                optimizer.load_state_dict(saved)

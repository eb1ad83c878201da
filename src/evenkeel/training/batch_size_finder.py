"""The largest micro-batch that fits: tried once when a run starts, by real passes over real samples.

What a step will need is there during a trial: the weights, the optimizers' state, a gradient and what forward keeps for
backward. Afterwards all is as it was before: the run begins as if nobody had tried.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.memory import is_out_of_memory
from ..common.naming import name_ranks
from ..config import Config
from ..data.batch import to_device
from ..data.dataset import SizedDataset
from ..data.loader import loader
from ..data.order import positions_in
from ..data.plan import next_smaller
from ..data.randomness import derive, generators_kept, seed_computation
from ..data.sampler import ElasticSampler
from ..distributed.data_parallel import parallel
from ..distributed.world import World
from .evaluation import same_tensors
from .loss import Loss
from .oom import OutOfMemory, explained, note_batch
from .state import State
from .task import Task

log = logging.getLogger(__name__)

RESERVE = 0.03
"""Part of a GPU's memory that must be left: NCCL takes some, and what is free is never in one piece."""


@dataclass
class Probe:
    """Finds the micro-batch of a run, with the samples of the first step. Call it once, on all ranks together."""

    config: Config
    """With --micro-batch auto."""
    task: Task
    world: World
    train_set: SizedDataset
    state: State
    """Model and optimizers as the run begins."""

    def __call__(self) -> tuple[int, str]:
        """The largest of --batch-size / world size, a half of it, ... that fits on every rank; and a line about it.

        Raises:
            OutOfMemory: on the ranks where not even one sample does.
        """
        # more than its share of a batch would leave another rank without work
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
                    size = 0  # BatchNorm does not take one sample; what is told is that two do not fit
                    break
                if last is None:
                    break
                failed.append(size)
                size = next_smaller(size, self.config.batch_size) if size > 1 else 0
        sizes = self.world.gather(size)
        found = min(sizes)
        if last is not None:
            raise OutOfMemory(explained(last, self.world.device, self.config)) from last
        if not found:
            raise OutOfMemory("--micro-batch auto: another rank has not even the memory for one sample")
        bound = name_ranks([rank for rank, fits in enumerate(sizes) if fits == found])
        more = f", on {bound} no more" if max(sizes) > found else f", not {failed[-1]}" if failed else ""
        return found, f"--micro-batch auto: {found} samples fit{more}, tried with real ones; the run keeps that number"

    def _try(self, size: int) -> BaseException | None:
        """The error for want of memory, if there is one. Without its traceback, which would keep that memory."""
        failure: BaseException | None = None
        try:
            self._try_within(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)
            failure.__context__ = failure.__cause__ = None
        self.state.clear_gradients()
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
            for device in self.world.devices:
                torch.cuda.reset_peak_memory_stats(device)  # a hint later asks how full the memory was
        return failure

    def _try_within(self, size: int) -> None:
        """All that takes memory lives no longer than this call."""
        _held = self._reserve(size)
        config = self.config
        sampler = ElasticSampler(self.train_set, config.batch_size, size, num_replicas=1, rank=0, seed=config.seed)
        batch = next(iter(loader(self.train_set, sampler, "train", 0, self.world.device)))
        try:
            self._two_passes(batch)
        except Exception as error:
            note_batch(error, batch)
            raise

    def _two_passes(self, batch: Any) -> None:
        """The second finds the gradient of the first and the state of the optimizers, as any but a run's first does."""
        loss = Loss(self.state.model, self.task.loss, self.config.precision, collectives=self.task.collectives)
        module = parallel(loss, self.config.strategy, self.world.device)
        for number in range(2):
            seed_computation(derive(self.config.seed, "micro-batch", 0, 0), self.world.devices)
            placed = batch if self.config.strategy == "dp" else to_device(batch, self.world.device)
            found = module(placed)
            (found[0] if isinstance(found, tuple) else found).backward()
            if number == 0:
                for optimizer in self.state.optimizers:
                    optimizer.step()

    def _reserve(self, size: int) -> list[Tensor]:
        """Memory that a step with micro-batches of this size takes besides, held during a trial."""
        held = []
        for device in self.world.devices:
            if device.type == "cuda":
                whole = torch.cuda.get_device_properties(device).total_memory
                held.append(torch.empty(int(whole * RESERVE), dtype=torch.uint8, device=device))
        gradients = [p for p in self.state.model.parameters() if p.requires_grad]
        return held + [torch.empty_like(p) for p in gradients for _ in range(self._more_gradients(size))]

    def _more_gradients(self, size: int) -> int:
        """Copies of the whole gradient that a step holds at its worst, besides the one that a trial has.

        DDP keeps one in its buckets. The tree keeps one for each bit of the number of this rank's micro-batches, and on
        several ranks two or three that it lays out and exchanges.
        """
        world_size = self.world.world_size
        micro_batches = -(-min(self.config.batch_size, positions_in(self.train_set)) // size)
        levels = (-(-micro_batches // world_size) - 1).bit_length()
        if self.config.reduce == "ring":
            return int(world_size > 1)
        return levels + 3 if world_size > 1 else max(0, levels - 1)


@contextmanager
def _no_trace(state: State) -> Iterator[None]:
    """Put weights, buffers, optimizers and generators back to where they were, in every bit."""
    live = [*state.model.parameters()]
    values = [tensor.detach().cpu().clone() for tensor in live]
    optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in state.optimizers]
    with generators_kept(), same_tensors(state.model):
        try:
            yield
        finally:
            state.clear_gradients()
            with torch.no_grad():
                for tensor, value in zip(live, values, strict=True):
                    tensor.copy_(value)
            for optimizer, saved in zip(state.optimizers, optimizers, strict=True):
                optimizer.load_state_dict(saved)

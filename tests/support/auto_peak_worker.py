"""The address space that a rank needs for two steps of a sharded network, or for a trial of --micro-batch auto.

torchrun --nproc_per_node=W auto_peak_worker.py OUT.json {step,trial,control} MICRO_BATCH

Set MALLOC_MMAP_THRESHOLD_, so that freed memory is given back. The control reserves nothing for sums between rounds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from steps import passes, rank_0_writes
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evenkeel.config import Config
from evenkeel.data.data_digest import TRAINING
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.run.build import build_model, build_state, shard
from evenkeel.training.batch_size_finder import Probe
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.task import Task
from evenkeel.training.task_data import training_set

BATCH, WIDTH, BLOCKS = 14, 1024, 8


class Wide(Task):
    """Its memory is that of its weights."""

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(2 * BATCH, WIDTH))

    def test_dataset(self) -> None:
        return None

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(BLOCKS)))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean()
        return loss


def address_space(name: str) -> int:
    """Bytes: VmPeak or VmSize."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def growth(world: World) -> float:
    """By how many times a rank's part of the weights its peak is above what it had before."""
    way, size, task = sys.argv[2], int(sys.argv[3]), Wide()
    config = Config(batch_size=BATCH, micro_batch="auto", shard="on", reduce="tree", optimizer="adamw").resolved()
    plan, train_set = Plan(2 * BATCH, BATCH, size, 1), training_set(task, config)
    state = build_state(config, task, world, plan, build_model(config, task), {TRAINING: train_set})
    shard(state, task, world, config)
    before = address_space("VmSize")
    if way == "step":
        model = DistributedLoss(task.loss, state, world, plan, config)
        for step in range(2):
            every, ranks = plan.micro_batches(step), world.world_size
            own = [every[n if n < len(every) else 0] for n in range(world.rank, -(-len(every) // ranks) * ranks, ranks)]
            passes(model, step, own, [[torch.ones(it.size, WIDTH)] for it in own])
            model.step()
    else:
        if way == "control":
            Probe._more_gradients = lambda _self, _size: 0  # type: ignore[method-assign]
        assert Probe(config, task, world, train_set, state)._try(size) is None
    return (address_space("VmPeak") - before) / (BLOCKS * WIDTH**2 * 4 / world.world_size)


if __name__ == "__main__":
    rank_0_writes(growth)

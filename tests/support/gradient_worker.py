"""Train a small net for some steps, our way and the naive way; rank 0 writes what came out as JSON.

torchrun --nproc_per_node=W gradient_worker.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from steps import passes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evenkeel.data.dataset import InMemory
from evenkeel.data.loader import loader
from evenkeel.data.sampler import ElasticSampler, by_step
from evenkeel.distributed.exits import leave
from evenkeel.distributed.world import World
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.state import State
from evenkeel.training.task import Classification

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 62, 20, 4, 3  # a step has 5 micro-batches, the tail only one


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Task(Classification):
    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, 6, generator=generator)
        return InMemory(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        return Net()


def flat(tensors: Any) -> list[float]:
    return torch.cat([t.detach().flatten().float() for t in tensors]).tolist()


def ours(world: World) -> dict[str, list[float]]:
    task = Task()
    model = task.model()
    state = State(model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    train_set = task.train_dataset()
    sampler = ElasticSampler(
        train_set, GLOBAL_BATCH, MICRO_BATCH, num_replicas=world.world_size, rank=world.rank, seed=1
    )
    batches = loader(train_set, sampler, "train", 0, world.device)
    gradients = DistributedLoss(task.loss, state, world, sampler.plan, seed=1)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, mine, their_batches in by_step(batches, sampler):
            state.clear_gradients()
            passes(gradients, step, mine, their_batches)
            gradients.step(clip_grad_norm(model.parameters(), 0.0))
            losses.append(gradients.loss.item())
    return {"weights": flat(model.parameters()), "statistics": flat(model.buffers()), "losses": losses}


def naive(world: World) -> dict[str, list[float]]:
    """The tutorial's loop: every rank takes a batch of its own, whose size has to be divided by hand."""
    task = Task()
    model = task.model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_set = TensorDataset(*task.train_dataset().tensors)
    sampler = DistributedSampler(train_set, seed=1)
    batch_size = GLOBAL_BATCH // world.world_size
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
    return {"weights": flat(model.parameters())}


if __name__ == "__main__":
    world = World.from_environment()
    with world.connected():
        result: dict[str, Any] = {"ours": ours(world), "naive": naive(world)}
        everywhere = world.gather((result["ours"]["weights"], result["ours"]["statistics"]))
        result["ranks_agree"] = all(other == everywhere[0] for other in everywhere)
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(result))
    leave(0)

"""A bare DDP loop, as PyTorch's tutorial writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workloads import JOB, LR, WEIGHT_DECAY, WORKLOAD, loss, time_steps


def epochs(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    """Batches, in a new order each epoch."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(WORKLOAD.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    dataset = WORKLOAD.data(True)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    share = JOB.batch_size // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=share, sampler=sampler, num_workers=WORKLOAD.workers)
    time_steps(optimizer)
    for _, batch in zip(range(JOB.steps), epochs(loader, sampler), strict=False):
        optimizer.zero_grad()
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), Path(JOB.folder, "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

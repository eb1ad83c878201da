"""Lightning Fabric, as "Convert PyTorch code to Fabric" writes it."""

from __future__ import annotations

import os
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader
from workloads import JOB, LR, WEIGHT_DECAY, WORKLOAD, endless, loss, time_steps


def main() -> None:
    """Train."""
    fabric = lightning.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = WORKLOAD.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    time_steps(optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    share = JOB.batch_size // fabric.world_size
    loader = DataLoader(WORKLOAD.data(True), batch_size=share, shuffle=True, num_workers=WORKLOAD.workers)
    loader = fabric.setup_dataloaders(loader)
    model.train()
    for _, batch in zip(range(JOB.steps), endless(loader), strict=False):
        optimizer.zero_grad()
        fabric.backward(loss(model, batch))
        optimizer.step()
    fabric.save(Path(JOB.folder, "model.ckpt"), {"model": model})


if __name__ == "__main__":
    main()

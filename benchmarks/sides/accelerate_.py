"""Hugging Face Accelerate, as its quick tour writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from workloads import JOB, LR, WEIGHT_DECAY, WORKLOAD, endless, loss, time_steps


def main() -> None:
    """Train."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = WORKLOAD.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    share = JOB.batch_size // accelerator.num_processes
    loader = DataLoader(WORKLOAD.data(True), batch_size=share, shuffle=True, num_workers=WORKLOAD.workers)
    time_steps(optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, batch in zip(range(JOB.steps), endless(loader), strict=False):
        optimizer.zero_grad()
        accelerator.backward(loss(model, batch))
        optimizer.step()
    accelerator.wait_for_everyone()
    accelerator.save_model(model, Path(JOB.folder, "model"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

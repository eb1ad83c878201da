"""The Lightning Trainer, as "Lightning in 15 minutes" writes it, with its logger, progress bar and checkpoints."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from workloads import JOB, LR, WEIGHT_DECAY, WORKLOAD, loss, time_steps


# mypy: disallow-subclassing-any=False
class Lit(lightning.LightningModule):
    """The workload."""

    def __init__(self) -> None:
        super().__init__()
        self.model = WORKLOAD.model()

    def training_step(self, batch: Any, _: int) -> Tensor:
        """The loss, logged."""
        found = loss(self.model, batch)
        self.log("train_loss", found)
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        time_steps(optimizer)
        return optimizer


def main() -> None:
    """Train."""
    lightning.seed_everything(0)
    ranks = int(os.environ["WORLD_SIZE"])
    loader = DataLoader(
        WORKLOAD.data(True), batch_size=JOB.batch_size // ranks, shuffle=True, num_workers=WORKLOAD.workers
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_steps=JOB.steps, default_root_dir=JOB.folder
    )
    trainer.fit(Lit(), loader)


if __name__ == "__main__":
    main()

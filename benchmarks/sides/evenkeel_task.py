"""Evenkeel's side: tasks for train.py, as a user would write them, with data sets of torch and torchvision's files."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from workloads import JOB, WORKLOAD, loss, time_steps

from evenkeel.config import Config
from evenkeel.tasks.classify import Classify
from evenkeel.training.task import Task


class Timed(Task):
    """Its steps are timed."""

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        """The default one."""
        made = super().optimizers(model, config)
        time_steps(made[0])
        if JOB.slow:
            made[0].register_step_pre_hook(lambda *_: time.sleep(JOB.slow))
        return made


class Plain(Timed):
    """Any workload whose data are tensors."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("loss", "min")

    def train_dataset(self) -> Any:
        """A `TensorDataset`."""
        return WORKLOAD.data(True)

    def test_dataset(self) -> Any:
        """The same."""
        return WORKLOAD.data(False)

    def model(self) -> nn.Module:
        """The workload's."""
        return WORKLOAD.model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The workload's."""
        return loss(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Cross-entropy."""
        inputs, targets = batch
        each = F.cross_entropy(model(inputs).transpose(1, -1), targets, reduction="none")
        return {"loss": each.view(len(each), -1).mean(1)}


class Jpegs(Timed, Classify):
    """The built-in classify with the workload's network, for --dataset imagefolder."""

    def model(self) -> nn.Module:
        """The workload's."""
        return WORKLOAD.model()

"""The recipe task with parts of its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from tests.support.recipe_task import Recipe


@dataclass
class Parts(Recipe):
    """The mean of the targets does not depend on the weights, so a test can know it."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        return loss, {"target": batch[1].mean(), "same": loss, "noisy/half": 0.5}

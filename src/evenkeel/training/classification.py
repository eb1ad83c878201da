"""The task of images or other inputs with one label each. Its own file, because an error in it is the user's data's."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .task import Task


class Classification(Task):
    """(image, label) data with cross-entropy and accuracy. A subclass adds the data and the model.

    >>> batch = torch.zeros(3, 4), torch.tensor([0, 1, 1])
    >>> class Mine(Classification):
    ...     train_dataset = test_dataset = model = None
    >>> Mine().loss(nn.Linear(4, 2), batch).shape
    torch.Size([])
    """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Cross-entropy and top-1 accuracy of each image."""
        images, labels = batch
        logits = model(images)
        return {"loss": F.cross_entropy(logits, labels, reduction="none"), "accuracy": logits.argmax(1) == labels}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The probability of each class, and the label."""
        images, labels = batch
        return {"probabilities": model(images).float().softmax(1), "target": labels}

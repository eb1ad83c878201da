"""A tiny language model for tests of --shard: tied embeddings, and sizes that few numbers of ranks divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from evenkeel.config import Config
from evenkeel.tasks.transformer import Decoder
from evenkeel.training.task import Task

VOCABULARY, LENGTH = 65, 12


class Tokens(Dataset[Tensor]):
    """Random tokens, a pure function of the sample's number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))


class Sharded(Task):
    """Two blocks of width 34."""

    def train_dataset(self) -> Dataset[Any]:
        return Tokens(50)

    def test_dataset(self) -> Dataset[Any]:
        return Tokens(11)

    def model(self) -> nn.Module:
        return Decoder(VOCABULARY, 34, heads=1, layers=2, dropout=0.1, end=None)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        logits = model(batch[:, :-1]).float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none")
        return {"loss": losses.mean(1)}


class Foreach(Sharded):
    """With the optimizer that --shard on uses, for comparison with runs without it."""

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        return [torch.optim.AdamW(model.parameters(), config.lr, foreach=True)]


class Predicted(Foreach):
    """With predictions."""

    def predict(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"probabilities": model(batch[:, :-1]).float()[:, -1].softmax(-1)}

"""A tiny language model for tests of --shard: tied embeddings, and sizes that few numbers of ranks divide."""

from dataclasses import dataclass
from typing import Any, ClassVar

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


@torch.no_grad()
def halve(block: nn.Module, _: object) -> None:
    """Write to a gathered weight, of which the rows learn nothing."""
    next(block.parameters()).mul_(0.5)


@dataclass
class Outside(Sharded):
    """Uses a weight outside of the forward pass of its block."""

    way: str = ""

    collectives: ClassVar[bool] = True

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        seen: list[Tensor] = []
        block = model.get_submodule("blocks.0")
        hooks = [block.register_forward_hook(lambda *it: seen.append(it[2]))]
        if self.way == "write":
            hooks.append(block.register_forward_pre_hook(halve))
        loss, weight = super().loss(model, batch), next(model.parameters())
        for hook in hooks:
            hook.remove()
        if self.way == "penalty":
            return loss + weight.square().sum()
        if self.way == "whole penalty":
            return loss + weight.full_tensor().square().sum()
        if self.way == "gradient":
            (slope,) = torch.autograd.grad(loss, seen, create_graph=True)
            return loss + slope.square().sum()
        return loss

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        weight: Any = next(model.parameters())
        if self.way == "number":
            weight.div_(weight.norm().item())
        if self.way == "draw":
            weight.add_(torch.randn_like(weight))
        if self.way == "row":
            weight[torch.tensor(3)] = 0
        if self.way == "rows":
            weight[3:5].mul_(2)
        if self.way == "whole":
            weight.div_((weight.full_tensor() if hasattr(weight, "full_tensor") else weight).norm().item())

"""Models for tests of the meta device: with all kinds of buffers, and with what cannot be built there."""

import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenkeel.config import Config
from evenkeel.tasks.transformer import Decoder
from tests.support.sharded_task import VOCABULARY, Sharded


class Buffers(Decoder):
    """Tied weights, a frozen one, and buffers that are drawn, not saved, of no dimension, or have two
    names."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, 34, heads=1, layers=2, dropout=0.1, end=None)
        self.register_buffer("noise", torch.randn(34), persistent=False)
        self.register_buffer("scale", torch.rand(34) + 0.5)
        self.register_buffer("count", torch.tensor(3))
        self.same = self.scale
        self.shift = random.random() + float(np.random.rand())
        self.low = nn.Parameter(torch.randn(5, 34))
        self.still = nn.Parameter(torch.randn(34), requires_grad=False)
        self.norm = Scaled(self)


class Scaled(nn.Module):
    """A norm that depends on all of them."""

    def __init__(self, owner: Buffers) -> None:
        super().__init__()
        self.of = [owner]  # in a list, so that it is no submodule
        self.inside = nn.RMSNorm(34)

    def forward(self, x: Tensor) -> Tensor:
        of = self.of[0]
        scaled = self.inside(x) * of.scale * of.same + of.noise + of.count * of.still + of.shift
        return scaled + of.low.sum(0)


class Built(Sharded):
    """Can be built on the meta device. Says on each rank what has memory before the model is divided."""

    def model(self) -> nn.Module:
        return Buffers()

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        if "DEVICES" in os.environ:
            devices = {parameter.device.type for parameter in model.parameters()}
            Path(os.environ["DEVICES"], os.environ["RANK"]).write_text(" ".join(devices))
        return super().optimizers(model, config)


class Drawn(Built):
    """Draws on the CPU, into what is no tensor of the model."""

    def model(self) -> nn.Module:
        model = super().model()
        model.shift = float(torch.rand(1, device="cpu"))
        return model


class Read(Built):
    """Reads a value."""

    def model(self) -> nn.Module:
        model = super().model()
        model.shift = model.low[0, 0].item()
        return model


class Attribute(Built):
    """Has a tensor that is no buffer."""

    def model(self) -> nn.Module:
        model = super().model()
        model.shift = torch.rand(34)
        return model


class Choosy(Built):
    """Its optimizer reads weights."""

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        found = super().optimizers(model, config)
        found[0].param_groups[0]["lr"] *= 1 + next(model.parameters()).norm().item()
        return found

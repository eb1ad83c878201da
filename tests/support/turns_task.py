"""A WGAN-GP: the critic learns in each step, with a gradient penalty, and the generator in every third."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from evenkeel.data.dataset import InMemory
from evenkeel.training.task import Losses, Task, constants

EVERY, SAMPLES = 3, 101


@dataclass
class Turns(Task):
    """Gulrajani et al., "Improved Training of Wasserstein GANs", 2017, in four dimensions."""

    best: ClassVar[Any] = None
    unused_parameters: ClassVar[bool] = True  # the generator has no gradient in two steps of three

    slow: str = ""
    """While this file exists, a micro-batch takes 0.2 s."""

    def train_dataset(self) -> InMemory:
        return InMemory(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0)))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        return nn.ModuleDict({"generator": nn.Linear(2, 4), "critic": critic})

    def optimizers(self, model: nn.Module, config: Any) -> list[Optimizer]:
        return [Adam(network.parameters(), lr=0.01, betas=(0.5, 0.9), fused=True) for network in model.children()]

    def loss(self, model: nn.Module, batch: Any, step: int = 0) -> Losses:
        if self.slow and Path(self.slow).exists():
            time.sleep(0.2)
        (real,) = batch
        generator, critic = model.children()
        made = generator(torch.randn(len(real), 2, device=real.device))
        between = (real + torch.rand(len(real), 1, device=real.device) * (made.detach() - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        d_loss = critic(made.detach()).mean() - critic(real).mean() + penalty
        if step % EVERY:
            return d_loss, {"d_loss": d_loss, "penalty": penalty}
        g_loss: Tensor = -torch.func.functional_call(critic, constants(critic), made).mean()
        return d_loss + g_loss, {"d_loss": d_loss, "penalty": penalty}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"score": model.get_submodule("critic")(batch[0]).squeeze(1)}

"""A vision transformer of timm, trained on the digits by timm's recipe for fine-tuning.

    torchrun --standalone --nproc_per_node=2 train.py --task examples/vit_of_timm.py:Timm --epochs 10 --lr 2e-3

The learning rate falls from the last block to the first (`--layer-decay`), and norms, biases and positions are not
decayed.
"""

from dataclasses import dataclass
from typing import Any

import timm
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.optim import Optimizer

from evenkeel import Classification, Config
from evenkeel.tasks import InMemory, digits


@dataclass
class Timm(Classification):
    network: str = "vit_tiny_patch16_224"
    """Name of a vision transformer in timm."""
    layer_decay: float = 0.75
    """Learning rate of each block / that of the next."""

    def train_dataset(self) -> InMemory:
        return digits(train=True)

    def test_dataset(self) -> InMemory:
        return digits(train=False)

    def model(self) -> nn.Module:
        small: dict[str, Any] = {"img_size": 8, "patch_size": 2, "depth": 4, "embed_dim": 64, "num_heads": 4}
        network = timm.create_model(self.network, num_classes=10, in_chans=1, drop_path_rate=0.1, **small)
        return nn.Sequential(Scale(), network)

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        recipe = {"lr": config.lr, "weight_decay": config.weight_decay, "layer_decay": self.layer_decay}
        optimizer: Optimizer = create_optimizer_v2(model.get_submodule("1"), "adamw", **recipe)
        for group in optimizer.param_groups:
            group["lr"] *= group["lr_scale"]  # which is left to timm's schedulers
        return [optimizer]


class Scale(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.float() / 127.5 - 1

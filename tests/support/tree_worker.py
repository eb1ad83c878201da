"""Train a net in many ways with the tree, and once with the ring; rank 0 writes the fingerprint of each result as JSON.

torchrun --nproc_per_node=W tree_worker.py OUT.json MICRO_BATCHES
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from steps import rank_0_writes, training
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenkeel.distributed.world import World
from evenkeel.training.determinism import fix_arithmetic
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.state import State
from evenkeel.training.state_dicts import sha256
from evenkeel.training.task import Task

SIZE = 3
"""Samples of a micro-batch."""


class Noisy(Dataset[Any]):
    """Images with augmentation: noise from the global generator."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(samples, 3, 8, 8, generator=generator)
        self.labels = (self.images.mean((1, 2, 3)) > 0).long()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index] + 0.1 * torch.randn(3, 8, 8), self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.tied = nn.Conv2d(16, 16, 3, padding=1)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.rare = nn.Linear(16, 16)
        self.last = nn.Linear(16, 2)

    def forward(self, images: Tensor, rare: bool) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        x = self.tied(F.relu(self.second(x))).mean((2, 3))
        x = self.drop(self.frozen(x))
        return self.last(self.rare(x) if rare else x)


@dataclass
class Way(Task):
    """One row of the matrix."""

    reduce: Literal["ring", "tree"] = "tree"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(m.parameters(), 1e-2)
    clip: float = 0.0
    workers: int = 0
    half: bool = False
    channels_last: bool = False
    rank_noise: int = -1
    """A rank's number, as seed of its dropout: the control."""
    unused_parameters: bool = field(default=False)

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        net = Net()
        return net.to(memory_format=torch.channels_last) if self.channels_last else net

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        if self.rank_noise >= 0:
            torch.manual_seed(self.rank_noise)
        # a layer that only some micro-batches use, and in some steps none
        rare = not self.unused_parameters or bool(images.sum() > 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            return F.cross_entropy(model(images, rare).float(), labels)

    def train_dataset(self) -> Any: ...
    def test_dataset(self) -> Any: ...
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]: ...


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}], lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, fused=True)


WAYS = {
    "adamw": Way(),
    "sgd, momentum, clipping": Way(optimizer=momentum, clip=0.5),
    "2 loader workers": Way(workers=2),
    "bf16 autocast": Way(half=True),
    "channels last": Way(channels_last=True),
    "two groups": Way(optimizer=two_groups),
    "unused in some steps": Way(unused_parameters=True),
    "control: ring": Way(reduce="ring"),
    "control: noise of the rank": Way(),
}


def train(way: Way, world: World, micro_batches: int) -> list[str]:
    """Two epochs of four steps, the last of them short; fingerprints of the losses and of all that is committed."""
    model = way.model()
    state = State(model, [way.optimizer(model)])
    train_set, cut, losses = Noisy(SIZE * micro_batches * 3 + SIZE + 1), (SIZE * micro_batches, SIZE), []
    for gradients in training(way, state, world, train_set, cut, 2, way.workers, reduce=way.reduce):
        losses.append(gradients.loss.reshape(1))
        gradients.step(clip_grad_norm(model.parameters(), way.clip))
    captured = state.capture()
    tensors = dict(captured["model"]) | {"losses": torch.cat(losses)}
    for place, values in captured["optimizers"][0]["state"].items():
        tensors |= {f"{place} {name}": v for name, v in values.items() if isinstance(v, Tensor)}
    return [sha256({name: tensor}) for name, tensor in sorted(tensors.items())]


def found(world: World) -> dict[str, list[str]]:
    WAYS["control: noise of the rank"].rank_noise = world.rank
    result = {name: train(way, world, int(sys.argv[2])) for name, way in WAYS.items()}
    everywhere = world.all_gather({name: sha for name, sha in result.items() if "noise" not in name})
    return result | {"ranks agree": [str(all(other == everywhere[0] for other in everywhere))]}


if __name__ == "__main__":
    fix_arithmetic(exact=True)
    rank_0_writes(found)

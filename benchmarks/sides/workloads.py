"""What all sides of peers.py train: networks, data and loss, and how their steps are timed. Nothing here is Evenkeel's.

Each side is one script. The driver says by the environment what it is to do (:data:`JOB`); the script does it as its
own documentation has it and calls :func:`time_steps` on its optimizer.
"""

from __future__ import annotations

import atexit
import json
import os
import pydoc_data.topics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

LR, WEIGHT_DECAY = 2e-3, 0.01  # train.py's defaults


@dataclass(frozen=True)
class Job:
    """What the driver asks of a side."""

    workload: str
    batch_size: int  # of all ranks together
    steps: int
    folder: str  # for whatever the side writes
    images: str  # with train/CLASS/*.jpg and val/CLASS/*.jpg, where the workload has images
    slow: float = 0.0  # seconds that Evenkeel's side waits in each step, to see the smoke test fail


JOB = Job(**json.loads(os.environ["PEERS_JOB"]))


def time_steps(optimizer: Optimizer) -> None:
    """Note when each step of the optimizer has ended, by two clocks; leave that and the peak memory behind at exit.

    A hook of the optimizer is the one place that all sides pass once a step, whoever owns the loop.
    """
    ended: list[tuple[float, float]] = []
    optimizer.register_step_post_hook(lambda *_: ended.append((time.monotonic(), time.process_time())))

    def leave_behind() -> None:
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        found = {"ended": ended, "peak": int(peak.split()[1]) * 1024}
        Path(JOB.folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))

    atexit.register(leave_behind)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross-entropy, of images or of characters."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class GPT(nn.Module):
    """A language model of bytes, 3.3 M parameters."""

    def __init__(self, context: int = 128, width: int = 256, layers: int = 4, heads: int = 8) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] -> logits [n, length, 256]."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.blocks(x, mask, is_causal=True))


def text(train: bool, context: int = 128) -> TensorDataset:
    """Pieces of the one long English text that every Python has: its manual's help topics."""
    source = torch.tensor(list(Path(pydoc_data.topics.__file__).read_bytes()[: 2000 * context + 1]))
    part = slice(64, None) if train else slice(0, 64)
    return TensorDataset(source[:-1].view(-1, context)[part], source[1:].view(-1, context)[part])


def cnn() -> nn.Module:
    """The network that train.py has for the digits."""
    features = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Dropout(0.3), nn.Linear(1024, 10))


def digits(train: bool) -> TensorDataset:
    """8 x 8 pixels, in floats."""
    part = slice(360, None) if train else slice(0, 360)
    with np.load(Path(__file__).parents[2] / "src" / "evenkeel" / "assets" / "digits.npz") as data:
        images, labels = torch.from_numpy(data["images"])[part], torch.from_numpy(data["labels"])[part]
    return TensorDataset(images.float().unsqueeze(1) / 16, labels.long())


def resnet18() -> nn.Module:
    """11 M parameters, which take long to compute with."""
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def mlp() -> nn.Module:
    """25 M parameters, which take long to send and not to compute with."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), *hidden, nn.Linear(2048, 10))


def synthetic(*shape: int) -> Callable[[bool], TensorDataset]:
    """Noise of a shape, in 10 classes."""

    def made(train: bool) -> TensorDataset:
        samples, generator = (1024 if train else 64), torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(samples, *shape, generator=generator), torch.arange(samples) % 10)

    return made


def tiny() -> nn.Module:
    """Next to nothing, so that loading is all there is."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, 10))


def jpegs(train: bool) -> Any:
    """Files, as PyTorch's ImageNet example reads them."""
    from torchvision import datasets, transforms

    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    random = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    fixed = [transforms.Resize(256), transforms.CenterCrop(224)]
    change = transforms.Compose([*(random if train else fixed), transforms.ToTensor(), normalize])
    return datasets.ImageFolder(Path(JOB.images, "train" if train else "val"), change)


@dataclass(frozen=True)
class Workload:
    """A network, its data (for training, or for the evaluation), and loading processes for each rank."""

    model: Callable[[], nn.Module]
    data: Callable[[bool], Any]
    workers: int = 0


WORKLOAD = {
    "digits": Workload(cnn, digits),
    "resnet18": Workload(resnet18, synthetic(3, 64, 64)),
    "mlp": Workload(mlp, synthetic(1, 8, 8)),
    "jpegs": Workload(tiny, jpegs, workers=1),
    "gpt": Workload(GPT, text),
}[JOB.workload]

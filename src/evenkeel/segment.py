"""`segment`: adversarial segmentation, two networks that learn from each other in one step.

After Hung et al., "Adversarial Learning for Semi-Supervised Semantic Segmentation", BMVC 2018 (arXiv 1802.07934): a
segmenter (torchvision's DeepLabV3) labels every pixel, and a small discriminator learns to tell its maps from
true ones; besides the cross-entropy the segmenter learns to be taken for true. The data is made from the digits that
come with Evenkeel, several on a canvas, so that it needs no download and its masks are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.data import Dataset

from . import datasets
from .config import COUNT, FINITE, Config, check_numbers
from .errors import Refusal
from .optimization import build_optimizer, rate
from .randomness import derive
from .sync_batchnorm import SyncBatchNorm
from .tasks import Task, constants

CLASSES = 11
"""Background and ten digits."""

Backbone = Literal["resnet18", "mobilenet_v3_large", "resnet50", "resnet101", "small"]


class Canvases(Dataset[Any]):
    """Canvases with digits, and which digit each pixel belongs to. A canvas is a function of its number alone.

    Args:
        digits: images [N, 1, 8, 8], uint8.
        labels: which digits those are, [N].
        split: keeps the canvases of different parts apart.
        samples: how many canvases there are.
        canvas: their side in pixels.
        digit_size: side of a digit in pixels.
        count: digits on a canvas. A later one lies on top of those before it.
    """

    def __init__(
        self, digits: Tensor, labels: Tensor, split: str, samples: int, canvas: int, digit_size: int, count: int
    ) -> None:
        self.digits, self.labels, self.split = digits, labels, split
        self.samples, self.canvas, self.digit_size, self.count = samples, canvas, digit_size, count

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(image, mask): float [1, canvas, canvas] in 0 .. 1; int64 [canvas, canvas], 0 or 1 + the digit."""
        generator = torch.Generator().manual_seed(derive(0, f"segment {self.split}", index))
        image = torch.zeros(1, self.canvas, self.canvas)
        mask = torch.zeros(self.canvas, self.canvas, dtype=torch.int64)
        chosen = torch.randint(len(self.labels), (self.count,), generator=generator)
        places = torch.randint(self.canvas - self.digit_size + 1, (self.count, 2), generator=generator)
        sized = F.interpolate(self.digits[chosen] / 255, size=self.digit_size, mode="bilinear")
        for digit, label, (y, x) in zip(sized, self.labels[chosen], places.tolist(), strict=True):
            there = slice(y, y + self.digit_size), slice(x, x + self.digit_size)
            ink = digit[0] > INK
            image[0][there][ink] = digit[0][ink]
            mask[there][ink] = 1 + label
        return image, mask


INK = 0.2
"""A pixel of a digit that is darker than this belongs to it."""


BOUNDS: dict[str, tuple[float, float]] = {
    "canvas": (32, 2**14),
    "digit_size": (8, 2**14),
    "digits_per_canvas": (1, 10_000),
    "samples": (1, COUNT),
    "test_samples": (1, COUNT),
    "adversarial": (0, FINITE),
    "discriminator_width": (1, 2**14),
    "discriminator_lr": (0, FINITE),
}


@dataclass
class Segment(Task):
    """Label every pixel of canvases with digits (0: background, 1 .. 10: a digit), against a discriminator.

    Two networks, two optimizers, two learning rates, one step. The segmenter's optimizer, learning rate and schedule
    are the job's (--optimizer, --lr, --schedule; DeepLab's own schedule is poly), the discriminator's stand below.
    """

    backbone: Backbone = "resnet18"
    """Of DeepLabV3: mobilenet_v3_large, resnet50 or resnet101; resnet18: its first half; small: for tests."""
    canvas: int = 64
    """Side of a canvas in pixels."""
    digit_size: int = 32
    """Side of a digit in pixels."""
    digits_per_canvas: int = 2
    """How many digits there are on a canvas; a later one may cover earlier ones."""
    samples: int = 1024
    """Canvases of the training data, made from the digits of its part."""
    test_samples: int = 256
    """Canvases of the test data, made from digits that the training never sees."""
    adversarial: float = 0.01
    """Weight of being taken for true by the discriminator, in the segmenter's loss. 0: cross-entropy alone."""
    discriminator_width: int = 16
    """Channels of the discriminator's first convolution; the paper has 64."""
    discriminator_lr: float = 1e-4
    """Peak learning rate of the discriminator, whose optimizer is Adam."""
    discriminator_schedule: Literal["same", "constant", "linear", "cosine", "poly"] = "linear"
    """Course of the discriminator's learning rate. same: as --schedule, as it is with a constant one anyway."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("miou", "max")

    def __post_init__(self) -> None:
        check_numbers(self, BOUNDS)
        if self.digit_size > self.canvas:
            raise Refusal(f"--digit-size {self.digit_size}: is above --canvas {self.canvas}; a digit must fit on it")

    def train_dataset(self) -> Canvases:
        """Canvases of the digits that `classify` is trained on."""
        return self._canvases("train", self.samples, *datasets.digits(train=True).tensors)

    def test_dataset(self) -> Canvases:
        """Canvases of the digits that `classify` is tested on."""
        return self._canvases("test", self.test_samples, *datasets.digits(train=False).tensors)

    def _canvases(self, split: str, samples: int, images: Tensor, labels: Tensor) -> Canvases:
        return Canvases(images, labels, split, samples, self.canvas, self.digit_size, self.digits_per_canvas)

    def model(self) -> nn.Module:
        """Two networks by name."""
        return nn.ModuleDict(
            {"segmenter": segmenter(self.backbone), "discriminator": discriminator(self.discriminator_width)}
        )

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        """One for each network."""
        assert isinstance(model, nn.ModuleDict)
        theirs = replace(config, optimizer="adam", lr=self.discriminator_lr, weight_decay=0.0)
        return [
            build_optimizer(model["segmenter"].parameters(), config),
            build_optimizer(model["discriminator"].parameters(), theirs),
        ]

    def rates(self, config: Config, step: int, total_steps: int) -> list[float]:
        """Each optimizer's own schedule."""
        follow = self.discriminator_schedule == "same" or config.schedule == "constant"
        theirs: Any = config.schedule if follow else self.discriminator_schedule
        return [rate(config, step, total_steps), rate(replace(config, schedule=theirs), step, total_steps)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Both networks' losses in one sum, so that there is one backward pass. Each learns from its own part only."""
        assert isinstance(model, nn.ModuleDict)
        images, masks = batch
        logits = labelled(model["segmenter"], images)
        made = logits.softmax(1)
        parts = [pixel_loss(logits, masks).mean()]
        if self.adversarial:
            # through the discriminator, but not into it: as if its parameters were constants
            verdict = functional_call(model["discriminator"], constants(model["discriminator"]), (made,))
            parts.append(self.adversarial * verdict_loss(verdict, True).mean())
        parts.append(verdict_loss(model["discriminator"](made.detach()), False).mean())
        parts.append(verdict_loss(model["discriminator"](one_hot(masks)), True).mean())
        return torch.stack(parts).sum()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Counts of each image, from which `summarize` makes the mean IoU of all pixels of all images."""
        assert isinstance(model, nn.ModuleDict)
        images, masks = batch
        logits = labelled(model["segmenter"], images)
        return {
            "confusion": confusion(logits.argmax(1), masks),
            "loss": pixel_loss(logits, masks).mean(1),
            "adversarial": verdict_loss(model["discriminator"](logits.softmax(1)), True),
        }

    def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Mean intersection over union of the classes that there are, and the share of pixels that are right."""
        counts = means["confusion"]
        right, union = counts.diag(), counts.sum(0) + counts.sum(1) - counts.diag()
        there = union > 0
        return {
            "miou": float((right[there] / union[there]).mean()),
            "pixel_accuracy": float(right.sum() / counts.sum()),
            "loss": float(means["loss"]),
            "adversarial": float(means["adversarial"]),
        }


def segmenter(backbone: Backbone) -> nn.Module:
    """A DeepLabV3 with random weights: [n, 3, h, w] -> {"out": [n, CLASSES, h, w]}."""
    from torchvision.models import segmentation

    if backbone in ("small", "resnet18"):
        features, channels = (small_backbone(), 64) if backbone == "small" else (half_resnet(), 128)
        net = segmentation.DeepLabV3(features, segmentation.deeplabv3.DeepLabHead(channels, CLASSES))
    else:
        build = getattr(segmentation, f"deeplabv3_{backbone}")
        net = build(weights=None, weights_backbone=None, num_classes=CLASSES)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # torchvision's MobileNet has 0.01, with which evaluation lags by hundreds of steps
    allow_single_samples(net)
    return net  # type: ignore[no-any-return]


def half_resnet() -> nn.Module:
    """torchvision's ResNet-18 up to its second stage: features {"out": [n, 128, h / 8, w / 8]}."""
    from torchvision.models import resnet18
    from torchvision.models._utils import IntermediateLayerGetter

    return IntermediateLayerGetter(resnet18(weights=None), {"layer2": "out"})  # type: ignore[no-any-return]


def small_backbone() -> nn.Module:
    """Three convolutions to an eighth of the size: features {"out": [n, 64, h / 8, w / 8]}."""

    class Small(nn.Sequential):
        def forward(self, images: Tensor) -> dict[str, Tensor]:
            return {"out": super().forward(images)}  # type: ignore[no-untyped-call]

    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return Small(*layers)


def discriminator(width: int) -> nn.Sequential:
    """Hung et al.'s: maps of class probabilities [n, CLASSES, h, w] -> a logit for each patch, positive for true."""
    layers: list[nn.Module] = []
    channels = CLASSES
    for outputs in (width, 2 * width, 4 * width, 8 * width):
        layers += [nn.Conv2d(channels, outputs, 4, 2, 1), nn.LeakyReLU(0.2)]
        channels = outputs
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4, 2, 1))


class PooledNorm(nn.BatchNorm2d):
    """BatchNorm after DeepLab's global pooling, where a batch of one sample has one value for each channel.

    torch raises an error there, and the last micro-batch of an epoch may be such a one; it is normalised with the
    running statistics, which it leaves alone. Names and everything else are as in `nn.BatchNorm2d`.
    """

    synchronised: ClassVar[type[SyncBatchNorm]]
    """What `sync_batchnorm.synchronise` makes of it."""

    def forward(self, values: Tensor) -> Tensor:
        """Normalise [n, channels, 1, 1]."""
        if values.numel() > values.shape[1] or not self.training:
            return super().forward(values)
        return F.batch_norm(values, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class SyncPooledNorm(SyncBatchNorm, PooledNorm):
    """The same over the global batch (--sync-batchnorm); a step of one sample is computed as there."""


PooledNorm.synchronised = SyncPooledNorm


def allow_single_samples(net: nn.Module) -> None:
    """Put a :class:`PooledNorm` behind each global pooling of a torchvision DeepLab."""
    from torchvision.models.segmentation.deeplabv3 import ASPPPooling

    for pooling in [module for module in net.modules() if isinstance(module, ASPPPooling)]:
        for place, module in enumerate(pooling):
            if isinstance(module, nn.BatchNorm2d):
                pooling[place] = PooledNorm(module.num_features, module.eps, module.momentum)


def labelled(network: nn.Module, images: Tensor) -> Tensor:
    """A segmenter's logits [n, CLASSES, h, w] of grey images [n, 1, h, w]."""
    return network(images.expand(-1, 3, -1, -1))["out"]  # type: ignore[no-any-return]


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy of each pixel, [n, h * w]. Flat, because on GPUs torch's two-dimensional one has no deterministic
    algorithm."""
    flat = logits.flatten(2).transpose(1, 2)
    masks = masks.flatten(1)
    return F.cross_entropy(flat.flatten(0, 1), masks.flatten(), reduction="none").view_as(masks)


def verdict_loss(verdict: Tensor, true: bool) -> Tensor:
    """Binary cross-entropy of a discriminator's logits of patches, the mean of each image, [n]."""
    wanted = torch.full_like(verdict, float(true))
    return F.binary_cross_entropy_with_logits(verdict, wanted, reduction="none").flatten(1).mean(1)


def one_hot(masks: Tensor) -> Tensor:
    """A mask as class probabilities, [n, CLASSES, h, w]."""
    return F.one_hot(masks, CLASSES).movedim(-1, 1).float()


def confusion(found: Tensor, masks: Tensor) -> Tensor:
    """Pixels of each image by (true class, found class), [n, CLASSES, CLASSES]; whole numbers in float64, in which
    neither autocast nor a sum rounds them."""
    true, guessed = (one_hot(classes).double().flatten(2) for classes in (masks, found))
    return true @ guessed.mT

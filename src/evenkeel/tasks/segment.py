"""`segment`: adversarial segmentation, the pattern for a job of several networks.

After Hung et al., "Adversarial Learning for Semi-Supervised Semantic Segmentation", BMVC 2018 (arXiv 1802.07934): a
segmenter (torchvision's DeepLabV3) labels every pixel, and a small discriminator learns to tell its maps from the true
ones; besides the cross-entropy, the segmenter learns to deceive it. The data is made from the digits that come with
Evenkeel, several on a canvas, so it needs no download and its masks are exact.
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

from ..common.errors import Refusal
from ..config import FINITE, Config, option
from ..data.randomness import derive
from ..distributed.sync_batchnorm import SyncBatchNorm
from ..training.optimization import build_optimizer, rate
from ..training.task import Task, constants
from .digits import digits

CLASSES = 11
"""Background and ten digits."""

INK = 0.2
"""A pixel of a digit that is brighter than this belongs to it."""

Backbone = Literal["resnet18", "mobilenet_v3_large", "resnet50", "resnet101", "small"]


@dataclass
class Segment(Task):
    """Label every pixel of canvases with digits (0: background, 1 .. 10: a digit), against a discriminator.

    The segmenter has the job's optimizer, learning rate and schedule (--optimizer, --lr, --schedule; DeepLab's own
    schedule is poly), the discriminator those below.
    """

    backbone: Backbone = "resnet18"
    """Backbone of DeepLabV3. resnet18: its first half, quick to train on a CPU; small: for tests."""
    canvas: int = option(64, 32, 2**14)
    """Height and width of a canvas in pixels."""
    digit_size: int = option(32, 8, 2**14)
    """Height and width of a digit in pixels."""
    digits_per_canvas: int = option(2, 1, 10_000)
    """Digits on a canvas; later ones may cover earlier ones."""
    samples: int = option(1024, 1)
    """Canvases of the training data."""
    test_samples: int = option(256, 1)
    """Canvases of the test data, made from digits that are in no training canvas."""
    adversarial: float = option(0.01, 0, FINITE)
    """Weight of the adversarial loss in the segmenter's loss (0: cross-entropy alone)."""
    discriminator_width: int = option(16, 1, 2**14)
    """Channels of the discriminator's first convolution; 64 in the paper."""
    discriminator_lr: float = option(1e-4, 0, FINITE)
    """Peak learning rate of the discriminator's optimizer, Adam."""
    discriminator_schedule: Literal["same", "constant", "linear", "cosine", "poly"] = "linear"
    """Learning rate schedule of the discriminator. same: as --schedule. Constant if --schedule is."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("miou", "max")

    def __post_init__(self) -> None:
        if self.digit_size > self.canvas:
            raise Refusal(f"--digit-size {self.digit_size}: is above --canvas {self.canvas}; a digit must fit on it")

    def train_dataset(self) -> Canvases:
        """Canvases of the digits that `classify` is trained on."""
        return Canvases(self, "train")

    def test_dataset(self) -> Canvases:
        """Canvases of the digits that `classify` is tested on."""
        return Canvases(self, "test")

    def model(self) -> nn.Module:
        """Two networks by name."""
        width = self.discriminator_width
        return nn.ModuleDict({"segmenter": segmenter(self.backbone), "discriminator": discriminator(width)})

    def optimizers(self, model: Any, config: Config) -> list[Optimizer]:
        """One for each network."""
        theirs = replace(config, optimizer="adam", lr=self.discriminator_lr, weight_decay=0.0, momentum=None)
        return [
            build_optimizer(model["segmenter"].parameters(), config),
            build_optimizer(model["discriminator"].parameters(), theirs),
        ]

    def rates(self, config: Config, step: int, total_steps: int) -> list[float]:
        """Each optimizer's own schedule."""
        follow = self.discriminator_schedule == "same" or config.schedule == "constant"
        theirs: Any = config.schedule if follow else self.discriminator_schedule
        return [rate(config, step, total_steps), rate(replace(config, schedule=theirs), step, total_steps)]

    def loss(self, model: Any, batch: Any) -> Tensor:
        """The sum of both networks' losses, for one backward pass. Each network learns from its own part only."""
        images, masks = batch
        segmenter, discriminator = model["segmenter"], model["discriminator"]
        logits = segmenter(images.expand(-1, 3, -1, -1))["out"]
        maps = logits.softmax(1)
        parts = [pixel_loss(logits, masks).mean()]
        if self.adversarial:
            # through the discriminator, but not into it: its parameters count as constants
            verdict = functional_call(discriminator, constants(discriminator), (maps,))
            parts.append(self.adversarial * verdict_loss(verdict, True).mean())
        parts.append(verdict_loss(discriminator(maps.detach()), False).mean())
        parts.append(verdict_loss(discriminator(one_hot(masks)), True).mean())
        return torch.stack(parts).sum()

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """Of each image: the two losses, and counts, from which `summarize` makes the mean IoU."""
        images, masks = batch
        logits = model["segmenter"](images.expand(-1, 3, -1, -1))["out"]
        return {
            "confusion": confusion(logits.argmax(1), masks),
            "loss": pixel_loss(logits, masks).mean(1),
            "adversarial": verdict_loss(model["discriminator"](logits.softmax(1)), True),
        }

    def predict(self, model: Any, batch: Any) -> dict[str, Tensor]:
        """A summary of each image: the share of correct pixels, and how many pixels each class is given."""
        images, masks = batch
        found = model["segmenter"](images.expand(-1, 3, -1, -1))["out"].argmax(1)
        return {"pixel_accuracy": (found == masks).double().mean((1, 2)), "pixels": one_hot(found).sum((2, 3)).long()}

    def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Mean IoU over the classes that occur, share of correct pixels, and the losses."""
        counts = means["confusion"]
        right, union = counts.diag(), counts.sum(0) + counts.sum(1) - counts.diag()
        occurs = union > 0
        return {
            "miou": float((right[occurs] / union[occurs]).mean()),
            "pixel_accuracy": float(right.sum() / counts.sum()),
            "loss": float(means["loss"]),
            "adversarial": float(means["adversarial"]),
        }


class Canvases(Dataset[Any]):
    """Canvases with digits, and which digit each pixel belongs to. A canvas is a function of its number alone."""

    def __init__(self, task: Segment, part: Literal["train", "test"]) -> None:
        self.task, self.part = task, part
        self.digits, self.labels = digits(train=part == "train").tensors

    def __len__(self) -> int:
        return self.task.samples if self.part == "train" else self.task.test_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(image, mask): float [1, canvas, canvas] in 0 .. 1; int64 [canvas, canvas], 0 or 1 + the digit."""
        canvas, size, count = self.task.canvas, self.task.digit_size, self.task.digits_per_canvas
        generator = torch.Generator().manual_seed(derive(0, f"segment {self.part}", index))
        image, mask = torch.zeros(1, canvas, canvas), torch.zeros(canvas, canvas, dtype=torch.int64)
        chosen = torch.randint(len(self.labels), (count,), generator=generator)
        places = torch.randint(canvas - size + 1, (count, 2), generator=generator)
        sized = F.interpolate(self.digits[chosen] / 255, size=size, mode="bilinear")
        for digit, label, (y, x) in zip(sized, self.labels[chosen], places.tolist(), strict=True):
            ink, box = digit[0] > INK, (slice(y, y + size), slice(x, x + size))
            image[0][box][ink] = digit[0][ink]
            mask[box][ink] = 1 + label
        return image, mask


def segmenter(backbone: Backbone) -> nn.Module:
    """A DeepLabV3 with random weights: [n, 3, h, w] -> {"out": [n, CLASSES, h, w]}."""
    from torchvision.models import resnet18, segmentation
    from torchvision.models._utils import IntermediateLayerGetter

    if backbone == "small":  # three convolutions to an eighth of the size
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        features = IntermediateLayerGetter(nn.Sequential(*layers), {"8": "out"})
        net = segmentation.DeepLabV3(features, segmentation.deeplabv3.DeepLabHead(64, CLASSES))
    elif backbone == "resnet18":  # its first half, also to an eighth
        features = IntermediateLayerGetter(resnet18(weights=None), {"layer2": "out"})
        net = segmentation.DeepLabV3(features, segmentation.deeplabv3.DeepLabHead(128, CLASSES))
    else:
        build = getattr(segmentation, f"deeplabv3_{backbone}")
        net = build(weights=None, weights_backbone=None, num_classes=CLASSES)
    for module in list(net.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # torchvision's MobileNet has 0.01, with which evaluation lags by hundreds of steps
        if isinstance(module, segmentation.deeplabv3.ASPPPooling):
            module[2] = PooledNorm(module[2].num_features, module[2].eps, module[2].momentum)
    return net  # type: ignore[no-any-return]


class PooledNorm(nn.BatchNorm2d):
    """BatchNorm after DeepLab's global pooling, where a batch of one sample has one value per channel.

    torch raises an error there, but the last micro-batch of an epoch may be such a one; it is normalised with the
    running statistics, which stay as they are. Names in the state dict are those of `nn.BatchNorm2d`.
    """

    synchronised: ClassVar[type[SyncBatchNorm]]  # what --sync-batchnorm makes of it

    def forward(self, values: Tensor) -> Tensor:
        """Normalise [n, channels, 1, 1]."""
        if values.numel() > values.shape[1] or not self.training:
            return super().forward(values)
        return F.batch_norm(values, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class SyncPooledNorm(SyncBatchNorm, PooledNorm):
    """The same with the statistics of the global batch."""


PooledNorm.synchronised = SyncPooledNorm


def discriminator(width: int) -> nn.Sequential:
    """Hung et al.'s: class probabilities [n, CLASSES, h, w] -> a logit for each patch, positive for a true map."""
    layers: list[nn.Module] = []
    channels = CLASSES
    for outputs in (width, 2 * width, 4 * width, 8 * width):
        layers += [nn.Conv2d(channels, outputs, 4, 2, 1), nn.LeakyReLU(0.2)]
        channels = outputs
    return nn.Sequential(*layers, nn.Conv2d(channels, 1, 4, 2, 1))


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy of each pixel, [n, h * w]. Flat, because torch's for maps is not deterministic on GPUs."""
    flat, masks = logits.flatten(2).transpose(1, 2), masks.flatten(1)
    return F.cross_entropy(flat.flatten(0, 1), masks.flatten(), reduction="none").view_as(masks)


def verdict_loss(verdict: Tensor, true: bool) -> Tensor:
    """Binary cross-entropy of a discriminator's logits, the mean over the patches of each image, [n]."""
    wanted = torch.full_like(verdict, float(true))
    return F.binary_cross_entropy_with_logits(verdict, wanted, reduction="none").flatten(1).mean(1)


def one_hot(masks: Tensor) -> Tensor:
    """A mask as class probabilities, [n, CLASSES, h, w]."""
    return F.one_hot(masks, CLASSES).movedim(-1, 1).float()


def confusion(found: Tensor, masks: Tensor) -> Tensor:
    """Pixels of each image by (true class, found class), [n, CLASSES, CLASSES]; float64, where no sum is rounded."""
    true, guessed = (one_hot(classes).double().flatten(2) for classes in (masks, found))
    return true @ guessed.mT

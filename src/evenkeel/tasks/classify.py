"""The built-in task `classify`: images of a data set by name, by a network by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from ..common.errors import Ended, Refusal
from ..config import BELOW_1, FINITE, NAME, Flag, option
from ..data.dataset import SizedDataset
from ..training.classification import Classification
from . import datasets, models
from .datasets import ABOUT
from .decoding import Decode
from .digits import digits

PHOTOGRAPH = 224
"""Default height and width of crops, if images have different sizes."""

AUXILIARY_WEIGHT = 0.4
"""Weight of the losses of a network's auxiliary outputs."""


@dataclass
class Classify(Classification):
    """Image classification. Data sets and networks by name, augmentation, mixing, label smoothing."""

    dataset: Annotated[datasets.Name, NAME] = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, imagefolder (train/CLASS/ and val/CLASS/) or fake (noise)."""
    data_dir: Path = Path("data")
    """Folder of the data: downloads are stored here; an imagefolder has its train/ and val/ here."""
    model_: Annotated[str, tyro.conf.arg(name="model")] = models.OWN
    """cnn (a small one) or any classification network of torchvision, e.g. resnet50 or vit_b_16."""
    pretrained: Flag = False
    """Start with torchvision's pretrained weights and a new last layer."""
    image_size: int = option(0, 0, 2**14)
    """Height and width of the network's input in pixels, e.g. 64 (0: as in the data; imagefolder: 224)."""
    width: int = option(32, 1, 2**16)
    """Channels of the first convolution of the cnn."""
    dropout: float = option(0.3, 0, BELOW_1)
    """Dropout probability of the cnn."""
    augment: Annotated[Literal["none", "basic", "trivial", "rand"], NAME] = "none"
    """none; basic: random shift or crop, and flip; trivial or rand: basic, then TrivialAugment or RandAugment."""
    mixup: float = option(0.0, 0, FINITE)
    """MixUp alpha, e.g. 0.2 (0 disables it)."""
    cutmix: float = option(0.0, 0, FINITE)
    """CutMix alpha, e.g. 1.0 (0 disables it). With --mixup, each micro-batch draws one of the two."""
    label_smoothing: float = option(0.0, 0, BELOW_1)
    """Label smoothing, e.g. 0.1 (0 disables it)."""
    on_bad_sample: Annotated[datasets.OnBadSample, NAME] = "raise"
    """If an image file does not decode: raise (end the run) or skip (use another image instead)."""
    decode: Annotated[Decode, NAME] = "auto"
    """Decode image files: exact (whole, by Pillow), fast (the visible part) or auto (as before; new runs: fast)."""
    fake_samples: int = option(1000, 5)
    """Training samples of --dataset fake."""
    fake_classes: int = option(10, 1, 2**20)
    """Classes of --dataset fake."""

    harmless: ClassVar[frozenset[str]] = frozenset({"on_bad_sample"})  # so that a run that it has ended can continue
    earlier: ClassVar[Mapping[str, Any]] = {"decode": "exact"}

    def __post_init__(self) -> None:
        if self.model_ == models.OWN and self.image_size == 1:
            raise Refusal("--image-size 1: must be at least 2, or 0 for the data set's own size")
        models.check_model_name(self.model_)
        if self.pretrained:
            models.published_weights(self.model_)
        if self.mixup or self.cutmix:
            importlib.import_module("torchvision")  # before the run starts, so that its fingerprint has the version

    def options(self) -> dict[str, Any]:
        """All options, but not `decode` if there is nothing to decode: it must not prevent a resume of such a run."""
        found = super().options()
        return found if self.dataset == "imagefolder" else {name: found[name] for name in found if name != "decode"}

    def resolved(self, recorded: Mapping[str, Any] | None) -> Classify:
        """The same with `decode` settled."""
        if self.decode != "auto":
            return self
        earlier: Any = recorded.get("decode", self.earlier["decode"]) if recorded is not None else "fast"
        return replace(self, decode=earlier)

    def train_dataset(self) -> SizedDataset:
        """Images [C, H, W] in uint8, and labels; in whole micro-batches if no image needs separate work."""
        if self.dataset == "imagefolder":
            return self._photographs("train")
        whole = self._in_one_size(train=True)
        if self.augment == "none":
            return whole
        from .augmentation import of_small_images

        change = of_small_images(self.augment, self._size_in_the_data, ABOUT[self.dataset].flips)
        return datasets.Transformed(whole, change)

    def unchanged_train_dataset(self) -> SizedDataset:
        """The same without random changes."""
        return replace(self, augment="none").train_dataset()

    def test_dataset(self) -> SizedDataset:
        """The same of the test data."""
        return self._photographs("val") if self.dataset == "imagefolder" else self._in_one_size(train=False)

    def _in_one_size(self, train: bool) -> SizedDataset:
        if self.dataset == "digits":
            return digits(train)
        if self.dataset == "fake":
            samples, first = (self.fake_samples, 0) if train else (self.fake_samples // 5, self.fake_samples)
            return datasets.Fake(samples, self._size_in_the_data, self.fake_classes, first)
        return datasets.published(self.dataset, self.data_dir, train)

    def _photographs(self, part: Literal["train", "val"]) -> SizedDataset:
        from .augmentation import look_at_photographs, of_photographs

        kind = self.augment if part == "train" else "none"
        look = None if self.decode == "exact" else look_at_photographs(kind, self.size)
        found = datasets.ImageFolder(self.data_dir, part, self.on_bad_sample, look)
        return found if look else datasets.Transformed(found, of_photographs(kind, self.size))

    def model(self) -> nn.Module:
        """The network of --model, with an output for each class of the data set."""
        if self.model_ == models.OWN:
            return models.SmallCNN(self.classes, self.width, self.dropout, ABOUT[self.dataset].channels, self.size)
        weights = models.published_weights(self.model_) if self.pretrained else None
        return models.torchvision_model(self.model_, self.classes, self.size, weights)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy, with mixing and label smoothing. Draws from torch's generator of the CPU."""
        images, labels = batch
        inputs = self.inputs(images)
        if (self.mixup or self.cutmix) and model.training:
            inputs, labels = self._mixing(inputs, labels)
        cross_entropy = partial(F.cross_entropy, target=labels, label_smoothing=self.label_smoothing)
        outputs = model(inputs)
        if isinstance(outputs, Tensor):
            return cross_entropy(outputs)
        main, *auxiliary = (cross_entropy(output) for output in outputs if output is not None)
        return main + AUXILIARY_WEIGHT * sum(auxiliary)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Cross-entropy and top-1 accuracy of each image; with --on-bad-sample skip also which do not decode."""
        images, labels = batch
        if self.on_bad_sample == "raise":
            return super().metrics(model, (self.inputs(images), labels))
        bad = labels < 0
        values = super().metrics(model, (self.inputs(images), labels.clamp(min=0)))
        return {**{name: torch.where(bad, 0.0, value.double()) for name, value in values.items()}, "left_out": bad}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The probability of each class, and the label."""
        return super().predict(model, (self.inputs(batch[0]), batch[1]))

    def read_image(self, path: Path) -> Any:
        """An image file in the form of the test data's images, without a label."""
        if self.dataset != "imagefolder":
            return datasets.in_the_form_of(self.dataset, datasets.read_image(path), self._size_in_the_data), -1
        from .augmentation import look_at_photographs, of_photographs

        if self.decode == "exact":
            return of_photographs("none", self.size)(datasets.read_image(path)), -1
        return datasets.read_image(path, look_at_photographs("none", self.size)), -1

    def class_names(self) -> list[str]:
        """Names of the folders or of the data set's classes, if they are known."""
        if self.dataset == "imagefolder":
            return datasets.folder_classes(self.data_dir)
        return datasets.CLASS_NAMES.get(self.dataset, " ".join(map(str, range(self.classes)))).split()

    def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
        """The means over the images that decode, and the share of those that do not, if there are any."""
        left_out = float(means.get("left_out", 0.0))
        if left_out == 1:
            raise Ended("none of the test images decodes")
        found = {name: float(mean) / (1 - left_out) for name, mean in means.items() if name != "left_out"}
        return {**found, "left_out": left_out} if left_out else found

    def inputs(self, images: Tensor) -> Tensor:
        """The network's input for uint8 images [n, C, H, W], on their device: resized, in float32, normalised.

        Grey images get three equal channels for a network of torchvision's.
        """
        found = images / 255
        if found.shape[-1] != self.size:
            found = F.interpolate(found, (self.size, self.size), mode="bilinear", antialias=True)
        if images.device not in self._mean_and_std:  # copied once, because a copy makes the host wait for a GPU
            about: Any = ABOUT[self.dataset]
            if self.pretrained:
                about = models.published_weights(self.model_).transforms()
            both = (torch.tensor(values, device=images.device).view(-1, 1, 1) for values in (about.mean, about.std))
            self._mean_and_std[images.device] = tuple(both)
        mean, std = self._mean_and_std[images.device]
        if self.model_ != models.OWN and found.shape[1] == 1:
            return (found.expand(-1, 3, -1, -1) - mean).div_(std)
        return found.sub_(mean).div_(std)  # in place, because on a CPU fresh memory costs more than the arithmetic

    @cached_property
    def _mean_and_std(self) -> dict[torch.device, tuple[Tensor, ...]]:
        return {}

    @cached_property
    def _mixing(self) -> Any:
        from .augmentation import mixing

        return mixing(self.mixup, self.cutmix, self.classes)

    @cached_property
    def classes(self) -> int:
        """Number of classes of the data set."""
        if self.dataset == "imagefolder":
            return len(datasets.folder_classes(self.data_dir))
        return ABOUT[self.dataset].classes or self.fake_classes

    @property
    def size(self) -> int:
        """Height and width of the network's input in pixels."""
        return self.image_size or self._size_in_the_data or PHOTOGRAPH

    @property
    def _size_in_the_data(self) -> int:
        return (self.image_size if self.dataset == "fake" else 0) or ABOUT[self.dataset].size

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

from . import augmentation, datasets, models
from .augmentation import Augment
from .config import BELOW_1, COUNT, FINITE, NAME, Flag, check_numbers
from .data import SizedDataset
from .datasets import ABOUT, OnBadSample
from .decoding import Decode
from .downloads import fetch_weights
from .errors import Ended, Refusal
from .mistakes import TOO_FEW
from .tasks import Classification

PHOTOGRAPH = 224
"""Height and width of what is cut out of images that have each their own size."""

AUXILIARY_WEIGHT = 0.4
"""Of the losses of a network's auxiliary outputs."""


BOUNDS: dict[str, tuple[float, float]] = {
    "image_size": (0, 2**14),
    "width": (1, 2**16),
    "dropout": (0, BELOW_1),
    "mixup": (0, FINITE),
    "cutmix": (0, FINITE),
    "label_smoothing": (0, BELOW_1),
    "fake_samples": (5, COUNT),
    "fake_classes": (1, 2**20),
}


@dataclass
class Classify(Classification):
    """Image classification. Data sets and networks by name, augmentation, mixing, label smoothing."""

    dataset: Annotated[datasets.Name, NAME] = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, imagefolder (train/CLASS/ and val/CLASS/) or fake (noise)."""
    data_dir: Path = Path("data")
    """Where data sets are downloaded to, or what holds train/ and val/."""
    model_: Annotated[str, tyro.conf.arg(name="model")] = models.OWN
    """cnn, a small one, or a classification network of torchvision: resnet50, vit_b_16 ..."""
    pretrained: Flag = False
    """Begin with torchvision's weights; the last layer is new."""
    image_size: int = 0
    """Pixels the network sees, each way. 0: as in the data; 224 of an imagefolder."""
    width: int = 32
    """Of the cnn: channels of its first convolution."""
    dropout: float = 0.3
    """Of the cnn: share of features that is dropped."""
    augment: Annotated[Augment, NAME] = "none"
    """none; basic: shift or crop, and flip; trivial, rand: then TrivialAugment or RandAugment."""
    mixup: float = 0.0
    """Alpha of blending images in pairs, say 0.2. 0: not."""
    cutmix: float = 0.0
    """Alpha of pasting a part of an image into another; with --mixup either of them. 0: not."""
    label_smoothing: float = 0.0
    """Share of the label spread over all classes."""
    on_bad_sample: Annotated[OnBadSample, NAME] = "raise"
    """When an image does not decode. raise: end; skip: another stands in for it."""
    decode: Annotated[Decode, NAME] = "auto"
    """Of an imagefolder. exact: all pixels, by Pillow; fast: only what is seen; auto: as the run began, or fast."""
    fake_samples: int = 1000
    """Training samples of the fake data."""
    fake_classes: int = 10
    """Classes of the fake data."""

    harmless: ClassVar[frozenset[str]] = frozenset({"on_bad_sample"})  # a run that one has ended must be able to go on
    earlier: ClassVar[Mapping[str, Any]] = {"decode": "exact"}

    def __post_init__(self) -> None:
        check_numbers(self, BOUNDS)
        if self.model_ == models.OWN and self.image_size == 1:
            raise Refusal("--image-size 1: must be at least 2, or 0 for the data set's own")
        models.check_model_name(self.model_)
        if self.pretrained:
            models.published_weights(self.model_)
        if self.mixup or self.cutmix:
            importlib.import_module("torchvision")  # before the run is begun, so that the fingerprint has its version

    def options(self) -> dict[str, Any]:
        """Without `decode` where there is nothing to decode: it must not keep such a run from going on."""
        found = super().options()
        return found if self.dataset == "imagefolder" else {name: found[name] for name in found if name != "decode"}

    def resolved(self, recorded: Mapping[str, Any] | None) -> Classify:
        """With `decode` settled."""
        if self.decode != "auto":
            return self
        earlier: Any = recorded.get("decode", self.earlier["decode"]) if recorded is not None else "fast"
        return replace(self, decode=earlier)

    def train_dataset(self) -> SizedDataset:
        """Images [C, H, W] in uint8, and labels; whole micro-batches of them where there is nothing to do for each."""
        if self.dataset == "imagefolder":
            return self._photographs("train", self.augment)
        whole = self._whole(train=True)
        about = ABOUT[self.dataset]
        change = augmentation.of_small_images(self.augment, self._size_in_the_data, about.flips)
        return datasets.Transformed(whole, change) if change else whole

    def test_dataset(self) -> SizedDataset:
        """The same without random changes."""
        if self.dataset == "imagefolder":
            return self._photographs("val", "none")
        return self._whole(train=False)

    def model(self) -> nn.Module:
        """The network of --model, its last layer as wide as the data set has classes."""
        if self.model_ == models.OWN:
            channels = ABOUT[self.dataset].channels
            return models.SmallCNN(self.classes, self.width, self.dropout, channels, self.size)
        weights = models.published_weights(self.model_) if self.pretrained else None
        if weights is not None:
            fetch_weights(weights, self.model_)
        return models.torchvision_model(self.model_, self.classes, self.size, weights)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy, with whatever mixing and smoothing there is. Draws from torch's generator of the CPU."""
        images, labels = batch
        inputs = self.inputs(images)
        if self._mixing and model.training:
            inputs, labels = self._mixing(inputs, labels)
        cross_entropy = partial(F.cross_entropy, target=labels, label_smoothing=self.label_smoothing)
        outputs = model(inputs)
        if isinstance(outputs, Tensor):
            return cross_entropy(outputs)
        main, *auxiliary = (cross_entropy(output) for output in outputs if output is not None)
        return main + AUXILIARY_WEIGHT * sum(auxiliary)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Cross-entropy and top-1 accuracy of each image, and which of them did not decode."""
        images, labels = batch
        if self.on_bad_sample == "raise":
            return super().metrics(model, (self.inputs(images), labels))
        bad = labels < 0
        values = super().metrics(model, (self.inputs(images), labels.clamp(min=0)))
        kept = {name: torch.where(bad, 0.0, value.double()) for name, value in values.items()}
        return {**kept, "left_out": bad}

    def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
        """The means over the images that decode, and the share of those that do not, if there are any."""
        left_out = float(means.get("left_out", 0.0))
        if left_out == 1:
            raise Ended("not one of the test images decodes")
        found = {name: float(mean) / (1 - left_out) for name, mean in means.items() if name != "left_out"}
        return {**found, "left_out": left_out} if left_out else found

    def takes_one_sample(self, model: nn.Module) -> bool:
        """Whether the network can be trained on one image, which depends on how small it makes it. It is tried."""
        channels = ABOUT[self.dataset].channels if self.model_ == models.OWN else 3
        try:
            models.try_shape(model, (1, channels, self.size, self.size))
        except ValueError as error:
            return TOO_FEW not in str(error)
        except Exception:  # a network of a subclass, say, that cannot do without values
            return True
        return True

    def inputs(self, images: Tensor) -> Tensor:
        """What the network sees of uint8 images [n, C, H, W], on their device: enlarged, in float32, normalised.

        Grey images have three equal channels for a network of torchvision's.
        """
        found = images / 255
        if found.shape[-1] != self.size:
            found = F.interpolate(found, (self.size, self.size), mode="bilinear", antialias=True)
        mean, std = self._mean_and_std(images.device)
        if self.model_ != models.OWN and found.shape[1] == 1:
            return (found.expand(-1, 3, -1, -1) - mean).div_(std)
        return found.sub_(mean).div_(std)  # in place, because on a CPU fresh memory costs more than the arithmetic

    @property
    def size(self) -> int:
        """Height and width of what the network sees."""
        return self.image_size or self._size_in_the_data or PHOTOGRAPH

    @cached_property
    def classes(self) -> int:
        """Classes of the data set."""
        if self.dataset == "imagefolder":
            return len(datasets.folder_classes(self.data_dir))
        return ABOUT[self.dataset].classes or self.fake_classes

    @property
    def _size_in_the_data(self) -> int:
        made = self.image_size if self.dataset == "fake" else 0
        return made or ABOUT[self.dataset].size

    def _whole(self, train: bool) -> SizedDataset:
        """A data set whose images are all of one size, as it is."""
        if self.dataset == "digits":
            return datasets.digits(train)
        if self.dataset == "fake":
            samples = self.fake_samples if train else self.fake_samples // 5
            first = 0 if train else self.fake_samples
            return datasets.Fake(samples, self._size_in_the_data, self.fake_classes, first)
        return datasets.published(self.dataset, self.data_dir, train)

    def _photographs(self, part: Literal["train", "val"], augment: Augment) -> SizedDataset:
        if self.decode == "exact":
            found = datasets.ImageFolder(self.data_dir, part, self.on_bad_sample)
            return datasets.Transformed(found, augmentation.of_photographs(augment, self.size))
        look = augmentation.look_at_photographs(augment, self.size)
        return datasets.ImageFolder(self.data_dir, part, self.on_bad_sample, look)

    @cached_property
    def _mixing(self) -> Any:
        return augmentation.mixing(self.mixup, self.cutmix, self.classes)

    def _mean_and_std(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._constants:  # copied once, because a copy makes the host wait for a GPU
            about: Any = ABOUT[self.dataset]
            if self.pretrained:  # as the network has learned to see
                about = models.published_weights(self.model_).transforms()
            mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (about.mean, about.std))
            self._constants[device] = mean, std
        return self._constants[device]

    @cached_property
    def _constants(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

"""Image data sets by name: uint8 images [C, H, W] of 0 .. 255 and the numbers of their classes.

Those that fit into memory come as `InMemory`, so that a micro-batch is one indexing. Only folders of image files are
read while training goes on, and so only they can have a file that does not decode.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from importlib.resources import as_file, files
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .augmentation import Transform
from .data import InMemory, SizedDataset
from .decoding import Look, pixels, seen
from .downloads import fetch_torchvision_data
from .errors import EndedByData, Refusal

Name = Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder", "fake"]
OnBadSample = Literal["raise", "skip"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class About:
    """What a network must know of a data set."""

    channels: int
    """1 or 3."""
    size: int
    """Height and width in pixels. 0: each image has its own."""
    classes: int
    """0: as many as there are folders, or as an option says."""
    mean: tuple[float, ...]
    """Of each channel over the training images, white being 1."""
    std: tuple[float, ...]
    """The same."""
    flips: bool
    """Whether the mirror image of one is of the same class."""


ABOUT: dict[Name, About] = {
    "digits": About(1, 8, 10, (0.0,), (1.0,), flips=False),
    "mnist": About(1, 28, 10, (0.1307,), (0.3081,), flips=False),
    "fashion-mnist": About(1, 28, 10, (0.2860,), (0.3530,), flips=True),
    "cifar10": About(3, 32, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), flips=True),
    "cifar100": About(3, 32, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), flips=True),
    "imagefolder": About(3, 0, 0, IMAGENET_MEAN, IMAGENET_STD, flips=True),
    "fake": About(3, 32, 0, (0.5, 0.5, 0.5), (0.29, 0.29, 0.29), flips=True),
}
assert set(ABOUT) == set(get_args(Name))

TEST_DIGITS = 360
"""A fifth of the digits, chosen once and for all."""


def digits(train: bool) -> InMemory:
    """The UCI optical digits that come with Evenkeel (assets/digits.md): 1,437 images, or 360 to test on."""
    part = slice(TEST_DIGITS, None) if train else slice(0, TEST_DIGITS)
    with as_file(files("evenkeel") / "assets" / "digits.npz") as path, np.load(path) as data:
        images, labels = torch.from_numpy(data["images"]), torch.from_numpy(data["labels"])
    # neighbours in the file share a writer, so the split takes every sample from anywhere
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[part]
    white = images[order].float().mul_(255 / 16).round_()  # there are 17 shades in the file
    return InMemory(white.to(torch.uint8).unsqueeze(1), labels[order].long())


def published(name: Name, root: Path, train: bool) -> InMemory:
    """MNIST, Fashion-MNIST, CIFAR-10 or CIFAR-100, read by torchvision, downloaded if need be.

    Raises:
        Refusal: the files are not there and cannot be had, or cannot be read.
    """
    from torchvision import datasets

    classes = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
    dataset: Any = getattr(datasets, classes[name])
    fetch_torchvision_data(dataset, name, root)
    try:
        read = dataset(root, train=train)
    except (OSError, RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise Refusal(
            f"--dataset {name}: its files in {root} cannot be read ({reason}); remove them, to download them again"
        ) from None
    if isinstance(read.data, Tensor):
        return InMemory(read.data.unsqueeze(1), torch.as_tensor(read.targets))
    return InMemory(torch.from_numpy(read.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(read.targets))


class Fake(Dataset[Any]):
    """Images of noise, each made from its number alone: the data set of a benchmark, of any size.

    Args:
        samples: how many.
        size: height and width.
        classes: sample i is of class i modulo this.
        first: number of the first, so that training and test do not have the same ones.
    """

    def __init__(self, samples: int, size: int, classes: int, first: int = 0) -> None:
        self.samples, self.size, self.classes, self.first = samples, size, classes, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        shape = (3, self.size, self.size)
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return image, index % self.classes


class Transformed(Dataset[Any]):
    """Another data set, sample by sample, with each image changed. Random changes are those of the sample."""

    def __init__(self, dataset: SizedDataset, transform: Transform) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, label = self.dataset[index]
        return self.transform(image), label


class BadSample(EndedByData):
    """A file that is there and does not decode."""


class UnreadFile(EndedByData):
    """A file that cannot be read, which may be otherwise next time."""


class ImageFolder(Dataset[Any]):
    """Image files in folders, ROOT/train/CLASS/FILE and ROOT/val/CLASS/FILE, as ImageNet's are laid out.

    Args:
        root: the folder of both.
        part: "train" or "val".
        on_bad_sample: what to do with a file that does not decode. raise: an error that names it. skip: in training
            another sample stands in for it, drawn with the random numbers of the bad one, so that it is the same one
            wherever it is loaded; for the test there is a black image with the label -1.
        look: what is seen of an image; None: all of it.

    Raises:
        Refusal: there are no such folders, or no images in them.
    """

    def __init__(
        self,
        root: Path,
        part: Literal["train", "val"],
        on_bad_sample: OnBadSample = "raise",
        look: Look | None = None,
    ) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

        self.folder, self.part, self.on_bad_sample, self.look = root / part, part, on_bad_sample, look
        classes = {name: number for number, name in enumerate(folder_classes(root))}
        known = {name: number for name, number in classes.items() if (self.folder / name).is_dir()}
        try:
            if unknown := sorted(set(_folders(self.folder)) - set(classes)):
                raise Refusal(f"--data-dir {root}: {part}/{unknown[0]} is a class without training images")
            samples = make_dataset(self.folder, known, IMG_EXTENSIONS, allow_empty=part == "val")
        except FileNotFoundError as error:
            raise Refusal(f"--data-dir {root}: {' '.join(str(error).split())}") from None
        # one array, because the counted references of a million strings would be copied by each loader process
        self.paths = np.array([os.fsencode(Path(path).relative_to(self.folder)) for path, _ in samples], dtype=bytes)
        self.labels = torch.tensor([label for _, label in samples])
        self._told = torch.zeros(len(samples), dtype=torch.bool)
        if on_bad_sample == "skip":
            self._told.share_memory_()  # type: ignore[no-untyped-call]  # among the loader processes, so that each file is told once

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        try:
            return self._decode(index), int(self.labels[index])
        except BadSample as bad:
            if self.on_bad_sample == "raise":
                raise BadSample(f"{bad}; mend it, or go on without it by --on-bad-sample skip") from None
            self._tell(index, bad)
        if self.part == "val":
            return self._pixels(Image.new("RGB", (8, 8))), -1
        return self._stand_in(index)

    def _stand_in(self, index: int) -> tuple[Tensor, int]:
        for _ in range(100):
            other = int(torch.randint(len(self), ()))
            try:
                return self._decode(other), int(self.labels[other])
            except BadSample as bad:
                self._tell(other, bad)
        raise BadSample(f"{self._name(index)} does not decode, nor do 100 others that were to stand in for it")

    def _decode(self, index: int) -> Tensor:
        """An image, [3, H, W], or what is seen of it.

        Raises:
            BadSample: what is in the file is not a whole image.
            UnreadFile: the file cannot be read, which may be otherwise next time; so it is never skipped.
        """
        from PIL import Image

        try:
            content = (self.folder / os.fsdecode(self.paths[index])).read_bytes()
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            reason = error.strerror or type(error).__name__
            raise UnreadFile(
                f"{self._name(index)} cannot be read: {reason}; such a file is never skipped, because it may be there "
                "again next time: bring it back, and run the same command again"
            ) from None
        try:
            with Image.open(BytesIO(content)) as image:
                return self._pixels(image, content)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise nearly everything
            reason = str(error).partition(" <_io.BytesIO")[0]  # the address of something in memory follows
            raise BadSample(f"{self._name(index)} does not decode: {type(error).__name__}: {reason}") from None

    def _pixels(self, image: Any, content: bytes = b"") -> Tensor:
        return seen(image, content, self.look) if self.look else pixels(image)

    def _name(self, index: int) -> str:
        part = "training" if self.part == "train" else "test"
        return f"{part} sample {index}, {self.folder / os.fsdecode(self.paths[index])},"

    def _tell(self, index: int, bad: BadSample) -> None:
        if self._told[index]:
            return
        self._told[index] = True
        what = "another stands in for it" if self.part == "train" else "it is left out of the metrics"
        log.warning("%s; %s; %d such so far on this rank", bad, what, int(self._told.sum()))


def folder_classes(root: Path) -> list[str]:
    """The classes of an image folder, in the order of their numbers.

    Raises:
        Refusal: it is not one.
    """
    try:
        if found := _folders(root / "train"):
            _folders(root / "val")
            return found
        reason = f"{root / 'train'} has no folders"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    raise Refusal(
        f"--data-dir {root}: is no image folder ({reason}); --dataset imagefolder reads {root}/train/CLASS/*.jpg and "
        f"{root}/val/CLASS/*.jpg, as ImageNet is laid out"
    )


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())

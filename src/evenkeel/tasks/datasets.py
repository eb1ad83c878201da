"""Image data sets by name: uint8 images [C, H, W] of 0 .. 255, and the numbers of their classes.

Those that fit into memory are an `InMemory`, so that a micro-batch is one indexing. Only folders of image files are
read during training, and only they can have a file that does not decode.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from ..common.errors import EndedByData, Refusal
from ..data.dataset import InMemory, SizedDataset
from .decoding import Look, jpeg_decoders, pixels, seen
from .downloads import fetch_dataset

Name = Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagefolder", "fake"]
OnBadSample = Literal["raise", "skip"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

log = logging.getLogger(__name__)


class About(NamedTuple):
    """Facts about a data set that a network needs."""

    channels: int
    size: int  # height and width in pixels; 0: each image has its own
    classes: int  # 0: as many as there are folders, or as --fake-classes says
    mean: tuple[float, ...]  # of each channel over the training images, white being 1
    std: tuple[float, ...]
    flips: bool  # whether an image and its mirror image are of the same class


CLASS_NAMES: dict[Name, str] = {
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
    "fashion-mnist": "t-shirt trouser pullover dress coat sandal shirt sneaker bag ankle-boot",
}

ABOUT: dict[Name, About] = {
    "digits": About(1, 8, 10, (0.0,), (1.0,), flips=False),
    "mnist": About(1, 28, 10, (0.1307,), (0.3081,), flips=False),
    "fashion-mnist": About(1, 28, 10, (0.2860,), (0.3530,), flips=True),
    "cifar10": About(3, 32, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), flips=True),
    "cifar100": About(3, 32, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), flips=True),
    "imagefolder": About(3, 0, 0, IMAGENET_MEAN, IMAGENET_STD, flips=True),
    "fake": About(3, 32, 0, (0.5, 0.5, 0.5), (0.29, 0.29, 0.29), flips=True),
}


def published(name: Name, root: Path, train: bool) -> InMemory:
    """MNIST, Fashion-MNIST, CIFAR-10 or CIFAR-100, read by torchvision and downloaded if need be."""
    from torchvision import datasets

    classes = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
    dataset: Any = getattr(datasets, classes[name])
    fetch_dataset(dataset, name, root)
    try:
        read = dataset(root, train=train)
    except (OSError, RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise Refusal(
            f"--dataset {name}: cannot read its files in {root} ({reason}); delete them to download them again"
        ) from None
    if isinstance(read.data, Tensor):
        return InMemory(read.data.unsqueeze(1), torch.as_tensor(read.targets))
    return InMemory(torch.from_numpy(read.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(read.targets))


class Fake(Dataset[Any]):
    """Images of noise, each a function of its number, for benchmarks. Sample i is of class i modulo `classes`."""

    def __init__(self, samples: int, size: int, classes: int, first: int = 0) -> None:
        self.samples, self.size, self.classes, self.first = samples, size, classes, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        shape = (3, self.size, self.size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), index % self.classes


def in_the_form_of(name: Name, image: Tensor, size: int) -> Tensor:
    """Any image, uint8 [3, H, W], with the channels of a data set and `size` pixels a side, as its images have."""
    if ABOUT[name].channels == 1:
        shares = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
        image = (image * shares).sum(0, keepdim=True).round().to(torch.uint8)
    return F.interpolate(image[None], (size, size), mode="bilinear", antialias=True)[0]


class Transformed(Dataset[Any]):
    """Another data set with each image changed."""

    def __init__(self, dataset: SizedDataset, transform: Callable[[Tensor], Tensor]) -> None:
        self.dataset, self.transform = dataset, transform
        self.stand_ins = getattr(dataset, "stand_ins", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, label = self.dataset[index]
        return self.transform(image), label


class BadSample(EndedByData):
    """A file that does not decode."""


class ImageFolder(Dataset[Any]):
    """Image files in folders, ROOT/train/CLASS/FILE and ROOT/val/CLASS/FILE, as ImageNet's are laid out.

    If `on_bad_sample` is "skip", another training sample replaces a file that does not decode, of the same part of a
    --validation split. It is drawn with the random numbers of the bad one, so that it is the same wherever it is
    loaded; in the test, a black image with the label -1. `look` says what is seen of an image; None: all of it.
    """

    def __init__(
        self, root: Path, part: Literal["train", "val"], on_bad_sample: OnBadSample = "raise", look: Look | None = None
    ) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

        self.folder, self.part, self.on_bad_sample, self.look = root / part, part, on_bad_sample, look
        if look:
            jpeg_decoders()  # loaded before loader processes are forked, and before the fingerprint is taken
        classes = folder_classes(root)
        here = _folders(self.folder)
        if unknown := sorted(set(here) - set(classes)):
            raise Refusal(f"--data-dir {root}: {part}/{unknown[0]} is a class without training images")
        numbers = {name: number for number, name in enumerate(classes) if name in here}
        try:
            samples = make_dataset(self.folder, numbers, IMG_EXTENSIONS, allow_empty=part == "val")
        except FileNotFoundError as error:  # torchvision's for a class without images
            raise Refusal(f"--data-dir {root}: {' '.join(str(error).split())}") from None
        # one array, because each loader process would copy a million strings when it counts references to them
        self.paths = np.array([os.fsencode(Path(path).relative_to(self.folder)) for path, _ in samples], dtype=bytes)
        self.labels = torch.tensor([label for _, label in samples])
        self.stand_ins = list[Sequence[int]]()  # `Limited` adds its indices, among which others replace a bad one
        self._logged = torch.zeros(len(samples), dtype=torch.bool)
        if on_bad_sample == "skip":
            self._logged.share_memory_()  # type: ignore[no-untyped-call]  # by the loader processes of a rank

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            return self._decode(index), int(self.labels[index])
        except BadSample as bad:
            if self.on_bad_sample == "raise":
                raise BadSample(f"{bad}; repair it, or continue without it by --on-bad-sample skip") from None
            self._log(index, bad)
        if self.part == "val":
            from PIL import Image

            black = Image.new("RGB", (8, 8))
            return seen(black, b"", self.look) if self.look else pixels(black), -1
        among = next((part for part in self.stand_ins if index in part), range(len(self)))
        for _ in range(100):
            other = among[int(torch.randint(len(among), ()))]
            try:
                return self._decode(other), int(self.labels[other])
            except BadSample as bad:
                self._log(other, bad)
        raise BadSample(f"{self._name(index)} does not decode, nor do 100 others that were drawn instead")

    def _decode(self, index: int) -> Tensor:
        """An image, [3, H, W], or what is seen of it. Raises what :func:`read_image` raises."""
        return read_image(self.folder / os.fsdecode(self.paths[index]), self.look, self._name(index))

    def _name(self, index: int) -> str:
        part = "training" if self.part == "train" else "test"
        return f"{part} sample {index}, {self.folder / os.fsdecode(self.paths[index])},"

    def _log(self, index: int, bad: BadSample) -> None:
        """Name each bad file once."""
        if not self._logged[index]:
            self._logged[index] = True
            what = "another image is used instead" if self.part == "train" else "it is left out of the metrics"
            log.warning("%s; %s; %d bad files so far on this rank", bad, what, int(self._logged.sum()))


def read_image(path: Path, look: Look | None = None, name: str = "") -> Tensor:
    """Decode an image file: all of it, or what is seen of it; `name` is for messages.

    Raises:
        BadSample: it does not decode.
        EndedByData: it cannot be read, but perhaps next time.
    """
    from PIL import Image

    name = name or str(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise EndedByData(
            f"{name} cannot be read: {error.strerror or type(error).__name__}; such a file is never skipped, because "
            "it may be there again next time: restore it and run the same command again"
        ) from None
    try:
        with Image.open(BytesIO(content)) as image:
            return seen(image, content, look) if look else pixels(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly everything
        reason = str(error).partition(" <_io.BytesIO")[0]  # an address in memory follows
        raise BadSample(f"{name} does not decode: {type(error).__name__}: {reason}") from None


def folder_classes(root: Path) -> list[str]:
    """The classes of an image folder in the order of their numbers; refused if it is none."""
    try:
        if found := _folders(root / "train"):
            _folders(root / "val")
            return found
        reason = f"{root / 'train'} has no folders"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    raise Refusal(
        f"--data-dir {root}: is not an image folder ({reason}); --dataset imagefolder reads {root}/train/CLASS/*.jpg "
        f"and {root}/val/CLASS/*.jpg, as ImageNet is laid out"
    )


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())

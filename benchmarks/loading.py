"""Loading alone, against torch's and torchvision's own: CPU time of a batch, as a ratio to theirs in the same round.

    python benchmarks/loading.py
    python benchmarks/loading.py decoders     # each decoder of JPEGs alone, as a ratio to Pillow's

Photographs: JPEGs of 500 x 375 and 256 x 256 px with smooth colours and edges, of quality 90, a random part and a flip
at 224 px; theirs is `ImageFolder` with the transforms of torchvision's reference training, up to normalised floats.
Digits: batches of 64 from a `TensorDataset`; theirs is `DataLoader(dataset, 64, shuffle=True)`. The control is theirs
against itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from evenkeel.data.loader import make_loader
from evenkeel.data.sampler import ElasticSampler
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.datasets import IMAGENET_MEAN, IMAGENET_STD
from evenkeel.tasks.decoding import Decoder, jpeg_decoders, pixels
from evenkeel.tasks.digits import digits

ROUNDS, IMAGES = 5, 160
REFERENCE = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
)


def photograph(width: int, height: int, seed: int) -> Any:
    """An image that compresses about as a photograph does."""
    generator = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for octave in range(2, 8):
        field = Image.fromarray(generator.integers(0, 256, (2**octave, 2**octave, 3), dtype=np.uint8))
        pixels += np.asarray(field.resize((width, height), Image.Resampling.BICUBIC)) * 0.55**octave
    image = Image.fromarray((255 * pixels / pixels.max()).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for x, y, side, *colour in generator.integers(0, [width, height, width // 4, 256, 256, 256], (25, 6)).tolist():
        draw.ellipse([x, y, x + side + 5, y + side + 5], fill=tuple(colour))
    return image.filter(ImageFilter.GaussianBlur(0.7))


def ours(dataset: Any, batch: int) -> DataLoader[Any]:
    """As `train.py` loads, without loader processes."""
    sampler = ElasticSampler(dataset, batch, batch, num_replicas=1, rank=0)
    return make_loader(dataset, sampler, "train", 0, torch.device("cpu"))


def compare(name: str, theirs: Iterable[Any], sides: Mapping[str, Iterable[Any]]) -> None:
    """Print the median of each side, and of its ratios to theirs."""
    every = {"theirs": theirs, "theirs again": theirs, **sides}
    rounds: dict[str, list[float]] = {side: [] for side in every}
    for _ in range(ROUNDS):
        for side, batches in every.items():
            start = time.process_time()
            count = sum(1 for _ in batches)
            rounds[side].append((time.process_time() - start) / count * 1e6)
    for side, spent in rounds.items():
        ratios = [mine / base for mine, base in zip(spent, rounds["theirs"], strict=True)]
        print(f"{name:24} {side:14} {median(spent):9.0f} us a batch  {median(ratios):5.2f}")


class Decoded:
    """Files, each decoded when its turn comes."""

    def __init__(self, files: list[bytes], decode: Callable[[bytes], Any]) -> None:
        self.files, self.decode = files, decode

    def __iter__(self) -> Iterator[Any]:
        return map(self.decode, self.files)


def decoders() -> None:
    """Whole images of two sizes by each decoder that loads here; theirs is Pillow's, up to a tensor."""
    for width, height, images in ((500, 375, 80), (1920, 1080, 10)):
        files = []
        for number in range(images):
            stream = BytesIO()
            photograph(width, height, number).save(stream, "JPEG", quality=90)
            files.append(stream.getvalue())
        sides = {name: Decoded(files, partial(from_bytes, decode)) for name, decode in jpeg_decoders().items()}
        pillow = Decoded(files, lambda file: pixels(Image.open(BytesIO(file))))
        compare(f"{width} x {height} px", pillow, sides)


def from_bytes(decode: Decoder, file: bytes) -> torch.Tensor:
    """As images are loaded."""
    return decode(torch.frombuffer(bytearray(file), dtype=torch.uint8))


def main() -> None:
    """All comparisons, about a minute."""
    tensors = TensorDataset(*digits(train=True).tensors)
    compare("digits, 64", DataLoader(tensors, 64, shuffle=True), {"ours": ours(tensors, 64)})
    for width, height in ((500, 375), (256, 256)):
        with TemporaryDirectory() as folder:
            for part in ("train", "val"):
                (Path(folder) / part / "class").mkdir(parents=True)
            for number in range(IMAGES):
                path = Path(folder) / "train" / "class" / f"{number}.jpg"
                photograph(width, height, number).save(path, quality=90)
            theirs: Any = DataLoader(ImageFolder(Path(folder) / "train", REFERENCE), 32, shuffle=True)
            options: Any = {"dataset": "imagefolder", "data_dir": Path(folder), "augment": "basic"}
            ways: tuple[Any, ...] = ("fast", "exact")
            sides = {f"ours, {way}": ours(Classify(**options, decode=way).train_dataset(), 32) for way in ways}
            compare(f"{width} x {height} px, 32", theirs, sides)


if __name__ == "__main__":
    decoders() if sys.argv[1:] == ["decoders"] else main()

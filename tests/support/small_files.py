"""Small real files in the formats of the well-known data sets, made from the digits."""

import gzip
import hashlib
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evenkeel.tasks.digits import digits

TRAIN, TEST = 90, 20
"""Samples in each kind of files."""


def digit_images(first: int, count: int, size: int) -> tuple[Any, Any]:
    """(uint8 [count, size, size], labels), enlarged and with a black edge."""
    images, labels = digits(train=True).tensors
    large = np.kron(images[first : first + count, 0].numpy(), np.ones((size // 8, size // 8), np.uint8))
    edge = size - large.shape[1]
    padded = np.pad(large, ((0, 0), (edge // 2, edge - edge // 2), (edge // 2, edge - edge // 2)))
    return padded, labels[first : first + count].numpy().astype(np.uint8)


def write_idx(folder: Path, compressed: bool = False) -> dict[str, str]:
    """The four files of MNIST; gives the name and the MD5 of each."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, first, count in (("train", 0, TRAIN), ("t10k", TRAIN, TEST)):
        images, labels = digit_images(first, count, 28)
        parts = {
            f"{name}-images-idx3-ubyte": struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes(),
            f"{name}-labels-idx1-ubyte": struct.pack(">II", 0x801, count) + labels.tobytes(),
        }
        for file, content in parts.items():
            path = folder / (f"{file}.gz" if compressed else file)
            path.write_bytes(gzip.compress(content, mtime=0) if compressed else content)
            written[path.name] = md5(path)
    return written


def write_cifar(root: Path, kind: int, packed: bool = False) -> dict[str, Any]:
    """The files of CIFAR-10 or CIFAR-100; gives the attributes of torchvision's class that name and check them."""
    ten = kind == 10
    base = root / ("cifar-10-batches-py" if ten else "cifar-100-python")
    base.mkdir(parents=True, exist_ok=True)
    images, labels = digit_images(0, TRAIN + TEST, 32)
    rows = np.repeat(images[:, None], 3, axis=1).reshape(len(images), -1)
    cuts = [*range(0, TRAIN, TRAIN // 5), TRAIN, TRAIN + TEST] if ten else [0, TRAIN, TRAIN + TEST]
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if ten else ["train", "test"]
    for name, first, end in zip(names, cuts, cuts[1:], strict=False):
        numbers = [int(label) * (1 if ten else 11) for label in labels[first:end]]
        batch = {"data": rows[first:end], "labels" if ten else "fine_labels": numbers}
        (base / name).write_bytes(pickle.dumps(batch))
    meta, key = ("batches.meta", "label_names") if ten else ("meta", "fine_label_names")
    (base / meta).write_bytes(pickle.dumps({key: [f"class {i}" for i in range(kind)]}))
    found = {
        "train_list": [[name, md5(base / name)] for name in names[:-1]],
        "test_list": [[names[-1], md5(base / names[-1])]],
        "meta": {"filename": meta, "key": key, "md5": md5(base / meta)},
    }
    if packed:
        archive = root / f"cifar-{kind}-python.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(base, base.name)
        found["tgz_md5"] = md5(archive)
    return found


def write_folder(root: Path) -> list[Path]:
    """JPEG files of three classes, of sizes that differ. Gives the files for training."""
    for part, first, count in (("train", 0, TRAIN), ("val", TRAIN, TEST)):
        images, labels = digit_images(first, count, 32)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = root / part / f"class-{label % 3}" / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[:, : 24 + number % 9]).save(path, quality=95)
    return sorted((root / "train").rglob("*.jpg"))


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def torchvision_that_needs(folder: Path, requirement: str) -> None:
    """An installed torchvision, as far as its metadata says."""
    info = folder / "torchvision-0.10.0.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: torchvision\nVersion: 0.10.0\nRequires-Dist: {requirement}\n"
    (info / "METADATA").write_text(text)

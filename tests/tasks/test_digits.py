"""The digits: the published ones, and split once and for all."""

import hashlib
from importlib.resources import files

import numpy as np
from torch import Tensor

from evenkeel.tasks.digits import digits


def sha256(array: np.ndarray | Tensor) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def test_the_data_file_is_the_published_one() -> None:
    """As scikit-learn publishes it; so do accuracies compare with those in the literature."""
    with np.load(str(files("evenkeel") / "assets" / "digits.npz")) as data:
        images, labels = data["images"], data["labels"]
    assert (images.shape, images.dtype) == ((1797, 8, 8), np.uint8)
    assert (labels.shape, labels.dtype) == ((1797,), np.uint8)
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert digest == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def as_published(images: Tensor) -> Tensor:
    """White is 255 in all our data sets, and 16 in the file of the digits; as float [n, 1, 8, 8] in 0 .. 1."""
    return (images * (16 / 255)).round() / 16


def test_the_digits_are_split_once_and_for_all() -> None:
    """On every machine and with every torch: or test accuracies would not compare, and test images be trained on."""
    images, labels = digits(train=False).tensors
    assert sha256(as_published(images)) == "7c3401169cdbee1f060e6d04c94645f91fe420ad46b379a368e07af32a0f395f"
    assert sha256(labels) == "6b9fbcf51df8abdf833082d58b708cdc455621bb08f86347ee812afe01d767b8"
    images, labels = digits(train=True).tensors
    assert sha256(as_published(images)) == "4594848184f8fe7d57e83a0f77505e063f14d6033e85da1a8e7812b2bbfa9ee6"
    assert sha256(labels) == "fad0543dffebb29f7794c9a15d6ba5504eef0cc3cdcc81edf810d94a280ff66c"

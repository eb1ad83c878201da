"""Random changes of images, by torchvision's transforms v2.

Those of one image are made where it is loaded, on uint8, with the random numbers of the sample; mixing is done on the
device, with the random numbers of the micro-batch. So neither depends on which process computes what.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torchvision.transforms import RandomResizedCrop, v2

from .decoding import Change, Look

Augment = Literal["none", "basic", "trivial", "rand"]
Transform = Callable[[Tensor], Tensor]


def of_small_images(kind: Augment, size: int, flips: bool) -> Transform:
    """For images of one size: a shift by up to an eighth of it, filled with black, a flip if `flips`, and more."""
    shift = v2.RandomCrop(size, padding=max(1, size // 8))
    return v2.Compose([shift, *([v2.RandomHorizontalFlip()] if flips else []), *_automatic(kind)])  # type: ignore[no-any-return]


def of_photographs(kind: Augment, size: int) -> Transform:
    """From images of any size to [3, size, size]: a random part of 8 % to 100 % of the area, a flip, and more.

    With "none", and in the evaluation, the middle of an image whose shorter side is 8/7 of the size.
    """
    if kind == "none":
        return v2.Compose([v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size)])  # type: ignore[no-any-return]
    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *_automatic(kind)])  # type: ignore[no-any-return]


def look_at_photographs(kind: Augment, size: int) -> Look:
    """The same, with the same random numbers, drawn before an image is decoded (`decoding.py`)."""
    if kind == "none":
        return partial(_middle, size=round(size * 8 / 7), change=of_photographs(kind, size))
    return partial(_random_part, size=size, changes=_automatic(kind))


def _middle(image: Any, size: int, change: Transform) -> tuple[int, Change]:
    return min(image.size) // size, lambda pixels, _smaller: change(pixels)


def _random_part(image: Any, size: int, changes: list[Transform]) -> tuple[int, Change]:
    """What `v2.RandomResizedCrop` and `v2.RandomHorizontalFlip` do, in whole pixels of the smaller image."""
    top, left, height, width = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    mirrored = bool(torch.rand(1) < 0.5)

    def change(pixels: Tensor, smaller: int) -> Tensor:
        top_, left_, bottom, right = (round(edge / smaller) for edge in (top, left, top + height, left + width))
        box = top_, left_, bottom - top_, right - left_
        part: Tensor = v2.functional.resized_crop(pixels, *box, [size, size], antialias=True)
        part = part.flip(-1) if mirrored else part
        for another in changes:
            part = another(part)
        return part

    return min(height, width) // size, change


def _automatic(kind: Augment) -> list[Transform]:
    return {"trivial": [v2.TrivialAugmentWide()], "rand": [v2.RandAugment()]}.get(kind, [])


def mixing(mixup: float, cutmix: float, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Mix each image of a micro-batch with its neighbour, and their labels, by MixUp or CutMix with these alphas.

    If both are above 0, each micro-batch draws one of the two.

    Returns:
        (float images [n, ...], labels [n]) -> (images, shares of the classes [n, classes]). It draws from torch's
        generator of the CPU, so that it does not wait for a GPU.
    """
    ways = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    ways += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    return v2.RandomChoice(ways) if len(ways) > 1 else ways[0]  # type: ignore[no-any-return]

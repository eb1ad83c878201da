"""Random changes of images, by torchvision's transforms v2.

Those of a single image are made where it is loaded, on uint8, with the random numbers of the sample; mixing is done on
the device, with the random numbers of the micro-batch. So neither depends on who computes what.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from .decoding import Change, Look

Augment = Literal["none", "basic", "trivial", "rand"]
Transform = Callable[[Tensor], Tensor]


def of_small_images(kind: Augment, size: int, flips: bool) -> Transform | None:
    """For images that are all of one size, and keep it; None where nothing is to be done.

    Args:
        kind: basic: a shift by up to an eighth of the side, the edge filled with black, and a flip; trivial, rand: the
            same and then TrivialAugment or RandAugment.
        size: height and width.
        flips: whether a mirror image is of the same class.
    """
    if kind == "none":
        return None
    from torchvision.transforms import v2

    shift = v2.RandomCrop(size, padding=max(1, size // 8))
    return v2.Compose([shift, *([v2.RandomHorizontalFlip()] if flips else []), *_automatic(kind)])  # type: ignore[no-any-return]


def of_photographs(kind: Augment, size: int) -> Transform:
    """For images of any size; the results are [3, size, size].

    Args:
        kind: none: the middle, of an image whose shorter side is 8/7 of the size, as the evaluation sees it; basic: a
            random part of 8 % to 100 % of the area, and a flip; trivial, rand: the same and then more.
        size: height and width of the results.
    """
    from torchvision.transforms import v2

    if kind == "none":
        return v2.Compose([v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size)])  # type: ignore[no-any-return]
    part = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    return v2.Compose([*part, *_automatic(kind)])  # type: ignore[no-any-return]


def look_at_photographs(kind: Augment, size: int) -> Look:
    """The same of images that are decoded afterwards (`decoding`), with the same random numbers."""
    if kind == "none":
        return partial(_middle, size=round(size * 8 / 7), change=of_photographs(kind, size))
    return partial(_random_part, size=size, changes=_automatic(kind))


def _middle(image: Any, size: int, change: Transform) -> tuple[int, Change]:
    return min(image.size) // size, lambda pixels, _smaller: change(pixels)


def _random_part(image: Any, size: int, changes: list[Transform]) -> tuple[int, Change]:
    """What `v2.RandomResizedCrop` and `v2.RandomHorizontalFlip` do, in whole pixels of the smaller image."""
    from torchvision.transforms import RandomResizedCrop
    from torchvision.transforms.v2.functional import resized_crop

    top, left, height, width = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    mirrored = bool(torch.rand(1) < 0.5)

    def change(pixels: Tensor, smaller: int) -> Tensor:
        top_, left_, bottom, right = (round(edge / smaller) for edge in (top, left, top + height, left + width))
        part: Tensor = resized_crop(pixels, top_, left_, bottom - top_, right - left_, [size, size], antialias=True)
        part = part.flip(-1) if mirrored else part
        for another in changes:
            part = another(part)
        return part

    return min(height, width) // size, change


def _automatic(kind: Augment) -> list[Transform]:
    from torchvision.transforms import v2

    return {"trivial": [v2.TrivialAugmentWide()], "rand": [v2.RandAugment()]}.get(kind, [])


def mixing(mixup: float, cutmix: float, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Mix each image of a micro-batch with its neighbour, and their labels; None where both strengths are 0.

    Args:
        mixup: alpha of the Beta distribution by which two whole images are blended.
        cutmix: alpha of that by which the area of a pasted rectangle is drawn. If both are above 0, each micro-batch
            draws one of the two.
        classes: number of classes.

    Returns:
        (float images [n, ...], labels [n]) -> (images, shares of the classes [n, classes]). Draws from torch's
        generator of the CPU, so that a GPU is not waited for.
    """
    if not (mixup or cutmix):
        return None
    from torchvision.transforms import v2

    ways = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    ways += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    return v2.RandomChoice(ways) if len(ways) > 1 else ways[0]  # type: ignore[no-any-return]

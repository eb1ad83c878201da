"""From what is in an image file to uint8 pixels [3, H, W].

Decoding takes most of the time of a photograph. torchvision's decoder gives the pixels of Pillow's in two thirds of the
time, and a JPEG can be decoded at a half, a quarter or an eighth of its size by leaving out frequencies. So `seen`
first looks at what of the image will be seen, which its size decides, and then decodes no more than that needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

RGB = 3
"""torchvision's number for it."""

Decode = Literal["auto", "exact", "fast"]

Change = Callable[[Tensor, int], Tensor]
"""(pixels, how many times smaller than the image they are) -> the result."""
Look = Callable[[Any], tuple[int, Change]]
"""An image of Pillow's, of which only the size is known -> (how many times smaller the result is, what makes it)."""


def seen(image: Any, content: bytes, look: Look) -> Tensor:
    """What is seen of an image that Pillow has opened, decoded as far as that needs.

    Args:
        image: not yet decoded.
        content: of its file.
        look: draws its random numbers before the image is decoded.

    Raises:
        Exception: as of :func:`pixels`.
    """
    smaller, change = look(image)
    width, height = image.size
    if smaller > 1:
        drafted = image.draft(None, (width // smaller, height // smaller))  # None but for a JPEG
        return change(pixels(image), round(width / drafted[1][2]) if drafted else 1)
    if image.format == "JPEG" and image.mode in ("L", "RGB") and (found := _by_torchvision(content)) is not None:
        return change(found, 1)
    return change(pixels(image), 1)


def _by_torchvision(content: bytes) -> Tensor | None:
    """A JPEG's pixels; None where it does not decode, of which Pillow has the last word."""
    if (decode := _torchvision_decoder()) is None:
        return None
    try:
        found: Tensor = decode(torch.frombuffer(bytearray(content), dtype=torch.uint8), RGB)
    except RuntimeError:
        return None
    return found


@cache
def _torchvision_decoder() -> Callable[[Tensor, int], Tensor] | None:
    """The operator, because the function around it warns that there will be none in later releases; None in those."""
    try:
        importlib.import_module("torchvision.io")
        return torch.ops.image.decode_jpeg.default
    except (ImportError, AttributeError):
        return None


def pixels(image: Any) -> Tensor:
    """All of an image that Pillow has opened.

    Raises:
        ValueError: its pixels have no known white.
        Exception: it does not decode.
    """
    from torchvision.transforms.v2.functional import pil_to_tensor

    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")  # older Pillows' name
    if sixteen_bits:  # Pillow's conversion takes 255 for white, and all above it as well
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return torch.from_numpy(grey.astype(np.uint8)).expand(3, -1, -1).contiguous()
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are {'whole' if image.mode == 'I' else 'real'} numbers of 32 bits, of which nothing says what "
            "white is; save it with 8 or 16 bits"
        )
    return pil_to_tensor(image.convert("RGB"))  # type: ignore[no-any-return]

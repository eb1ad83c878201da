"""Image files to uint8 pixels [3, H, W].

Decoding takes most of the time of loading a photograph. TorchCodec's and torchvision's decoders need two thirds of
Pillow's time for the same pixels, and a JPEG can be decoded at a half, a quarter or an eighth of its size. So `seen`
first asks which part of the image will be used, which depends on its size alone, and then decodes no more than needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

RGB = 3
"""torchvision's number for it."""
APP1 = b"\xff\xe1"
"""The marker of the segments of a JPEG that hold EXIF data."""

Decode = Literal["auto", "exact", "fast"]

Change = Callable[[Tensor, int], Tensor]
"""(pixels, the factor by which they are smaller than the image) -> the result."""
Look = Callable[[Any], tuple[int, Change]]
"""A Pillow image that is not decoded yet -> (the factor by which the result is smaller, what makes the result)."""
Decoder = Callable[[Tensor], Tensor]
"""A JPEG file's bytes -> uint8 [3, H, W]."""


def seen(image: Any, content: bytes, look: Look) -> Tensor:
    """Decode an opened Pillow image (`content` is its file) only as far as needed, and return what `look` makes of it.

    `look` draws its random numbers before the image is decoded. Raises what :func:`pixels` raises.
    """
    smaller, change = look(image)
    width, height = image.size
    if smaller > 1:
        drafted = image.draft(None, (width // smaller, height // smaller))  # None unless it is a JPEG
        return change(pixels(image), round(width / drafted[1][2]) if drafted else 1)
    found = _whole_jpeg(image, content) if image.format == "JPEG" and image.mode in ("L", "RGB") else None
    return change(pixels(image) if found is None else found, 1)


def _whole_jpeg(image: Any, content: bytes) -> Tensor | None:
    """A JPEG's pixels; None if it does not decode, because Pillow decides whether a file is damaged."""
    for name, data in image.applist:
        if name == "APP1":  # TorchCodec turns an image as its EXIF data say, and nothing else here does
            content = content.replace(APP1 + (len(data) + 2).to_bytes(2, "big") + data, b"", 1)
    decode = next(iter(jpeg_decoders().values()), None)
    if decode is None or APP1 in content:  # Pillow does not look for EXIF data behind the first scan; TorchCodec does
        return None
    try:
        return decode(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    except RuntimeError:
        return None


@cache
def jpeg_decoders() -> Mapping[str, Decoder]:
    """Those that load here besides Pillow, by name; the first one is used."""
    found = {}
    # equally fast; torchvision's is deprecated in favour of the other
    for name, find in (("TorchCodec", _torchcodec), ("torchvision", _torchvision)):
        with suppress(ImportError, AttributeError, OSError, RuntimeError):  # not there, or built for another torch
            found[name] = find()
    return found


def _torchcodec() -> Decoder:
    """From TorchCodec 0.16 on, without FFmpeg."""
    found: Decoder = importlib.import_module("torchcodec.decoders").decode_jpeg
    return found


def _torchvision() -> Decoder:
    """The operator, because the function around it warns that later releases will have none."""
    importlib.import_module("torchvision.io")
    operator = torch.ops.image.decode_jpeg.default
    return lambda data: operator(data, RGB)


def pixels(image: Any) -> Tensor:
    """Decode all of an opened Pillow image.

    Raises:
        ValueError: it has 32 bits a pixel, and nothing says which value is white.
        Exception: it does not decode.
    """
    from torchvision.transforms.v2.functional import pil_to_tensor

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # older Pillows' name for it
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257  # Pillow's own conversion clips at 255
        return torch.from_numpy(grey.astype(np.uint8)).expand(3, -1, -1).contiguous()
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floats"
        raise ValueError(
            f"its pixels are {kind} of 32 bits, and nothing says which value is white; save it with 8 or 16 bits"
        )
    return pil_to_tensor(image if image.mode == "RGB" else image.convert("RGB"))  # type: ignore[no-any-return]

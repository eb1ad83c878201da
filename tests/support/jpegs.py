"""JPEGs of every kind that a data set may hold, drawn by number, and what Pillow makes of each."""

from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

ORIENTATION = 0x0112
"""The tag of EXIF that says how to turn an image. Pillow's decoder leaves that to its caller."""


def photograph(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Any:
    """Smooth colours with edges in them."""
    generator = np.random.default_rng(seed)
    field = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    image = Image.fromarray(field).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(8):
        x, y = int(generator.integers(width)), int(generator.integers(height))
        colour = tuple(generator.integers(0, 256, 3).tolist())
        draw.ellipse([x, y, x + width // 4, y + height // 4], fill=colour)
    return image.convert(mode)


def encoded(image: Any, kind: str = "JPEG", **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(orientation: int) -> Any:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def by_pillow(content: bytes) -> Tensor | None:
    """[3, H, W] as `--decode exact` has had it from the beginning; None if the file does not decode."""
    try:
        with Image.open(BytesIO(content)) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    except Exception:
        return None


def jpegs(count: int) -> Iterator[tuple[Counter[str], bytes]]:
    """(what is in it, the file) of the first `count`."""
    for number in range(count):
        yield one(np.random.default_rng(number), number)


def one(draw: Any, number: int) -> tuple[Counter[str], bytes]:
    width, height = (1, 1) if number % 25 == 0 else draw.integers(1, 20 if number % 5 == 0 else 200, 2).tolist()
    mode, sampling = str(draw.choice(["RGB", "RGB", "RGB", "L", "CMYK"])), ""
    options: dict[str, Any] = {"quality": int(draw.choice([1, 5, 30, 75, 90, 95, 100]))}
    if mode == "RGB":
        sampling = str(draw.choice(["4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "1:4", "not YCbCr"]))
        written = {"4:4:0": "4:2:2", "4:1:1": "4:2:0", "1:4": "4:2:0"}.get(sampling, sampling)
        options |= {"keep_rgb": True} if sampling == "not YCbCr" else {"subsampling": written}
        if sampling != written:  # whole units, so that as many are left
            width, height = -(-width // 16) * 16, -(-height // 16) * 16
    found = Counter({f"{width}x{height}", mode, sampling, f"quality {options['quality']}"} - {""})
    for name, choice in (
        ("progressive", {"progressive": True}),
        ("optimized", {"optimize": True}),
        ("restart by block", {"restart_marker_blocks": int(draw.integers(1, 5))}),
        ("restart by row", {"restart_marker_rows": 1}),
        (f"turned {number % 8 + 1}", {"exif": turned(number % 8 + 1)}),
    ):
        if draw.integers(3) == 0:
            options |= choice
            found[name] = 1
    content = encoded(photograph(width, height, number, mode), **options)
    if sampling in FACTORS:
        content = resampled(content, *FACTORS[sampling], *draw.integers(8, size=2).tolist())
    if draw.integers(6) == 0:
        found["damaged"] = 1
        content = damaged(content, draw)
    return found, content


FACTORS = {"4:4:0": (1, 2), "4:1:1": (4, 1), "1:4": (1, 4)}
"""Blocks of brightness, across and down, for one of each colour: those that Pillow does not write."""


def resampled(content: bytes, across: int, down: int, left_out: int, below: int) -> bytes:
    """The blocks of a JPEG of 4:2:2 or 4:2:0 in another order, with some columns and lines left out.

    A unit of 4:2:2 and of 4:4:0 has two blocks of brightness; one of 4:2:0, 4:1:1 and 1:4 has four.
    """
    at = 2
    while content[at + 1] not in (0xC0, 0xC1, 0xC2):  # the header of the frame
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    height, width = (int.from_bytes(content[at + place : at + place + 2], "big") for place in (5, 7))
    columns, rows = width // 8 // (content[at + 11] >> 4), height // 8 // (content[at + 11] & 15)
    size = rows * 8 * down - below, columns * 8 * across - left_out
    changed = bytearray(content)
    changed[at + 5 : at + 9] = b"".join(length.to_bytes(2, "big") for length in size)
    changed[at + 11] = across << 4 | down
    return bytes(changed)


def damaged(content: bytes, draw: Any) -> bytes:
    """Cut off, or with other bytes in a few places."""
    if draw.integers(2):
        return content[: draw.integers(1, len(content))]
    changed = bytearray(content)
    for place in draw.integers(2, len(content), draw.integers(1, 5)):
        changed[place] = draw.integers(256)
    return bytes(changed)

"""What a job logs itself (`Run.log`) or shows at evaluations (`Task.show`): numbers, pictures and tables, from rank 0.

A picture becomes media/NAME/step-00000042.png in the run's folder, a table a .csv there; numbers are metrics like those
of a step. W&B and TensorBoard get them too, as far as they know such a thing.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..common.errors import Ended
from ..common.files import write_atomically
from ..common.naming import TRAIN, kind_of, named
from .tracking import Tracker

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")


def log(tracker: Tracker, step: int, values: Mapping[str, Any]) -> None:
    """Write values of a step, and send them to where metrics go.

    Args:
        values: by name. A number; a picture: a tensor of shape [H, W], [1, H, W] or [3, H, W], in uint8 or in floats
            from 0 to 1, or what has a `save` (Pillow) or `savefig` (matplotlib); or a table, a list of dicts.

    Raises:
        Ended: a name or value is something else.
    """
    numbers, files = check(values)
    if numbers:
        numbers = named(TRAIN, numbers)
        tracker.event("log", step, **numbers)
        tracker.send(step, numbers)
    for name, (suffix, content) in files.items():
        path = tracker.path / "media" / name / f"step-{step:08d}{suffix}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
        except OSError as error:  # a full disk costs a picture, not the training
            logger.error("%s: %s", path.relative_to(tracker.path), error)
            continue
        tracker.send(step, {name: path})


def check(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, tuple[str, bytes]]]:
    """The numbers, and the files of pictures and tables (suffix and content), by name. Raises as :func:`log`."""
    if not isinstance(values, Mapping):
        raise Ended(f"log: {kind_of(values)}: give a dict of values by name")
    numbers, files = dict[str, float](), dict[str, tuple[str, bytes]]()
    for name, value in values.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise Ended(f"log: {name!r} is no name: it has letters, digits, '_', '.', '-', and '/' between parts")
        if (number := _number(value)) is not None:
            numbers[name] = number
        else:
            table = isinstance(value, Sequence) and bool(value) and all(isinstance(row, Mapping) for row in value)
            files[name] = (".csv", _csv(value)) if table else (".png", _png(name, value))
    return numbers, files


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1 and value.dim() <= 1:
        return float(value)
    return float(value) if isinstance(value, Real) else None


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(row) for row in rows)
    return text.getvalue().encode()


def _png(name: str, value: Any) -> bytes:
    file = io.BytesIO()
    if callable(save := getattr(value, "savefig", None)):
        save(file, format="png", dpi=100)
    elif callable(save := getattr(value, "save", None)):
        save(file, format="PNG")
    else:
        _image(name, value).save(file, format="PNG")
    return file.getvalue()


def _image(name: str, value: Any) -> Any:
    from PIL import Image

    fits = isinstance(value, Tensor) and (value.dim() == 2 or (value.dim() == 3 and len(value) in (1, 3)))
    if not fits or value.dtype is torch.bool or value.is_complex() or not math.prod(value.shape):
        what = f"{list(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else kind_of(value)
        raise Ended(
            f"log: '{name}' is {what}: give a number, a picture (a tensor of shape [H, W] or [3, H, W], a Pillow image "
            "or a matplotlib figure) or a table (a list of dicts)"
        )
    pixels = value.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = (pixels.double().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = pixels.reshape(-1, *pixels.shape[-2:]).expand(3, -1, -1)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())

"""Write the samples of a step to files: pictures as PNG, text as text, all else as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def save_sample(folder: Path, step: int, sample: int, value: Any) -> None:
    """Write the parts of a sample to `folder`/step-N-sample-I-PART.png, .txt or .pt.

    Args:
        folder: exists.
        step: counted from 1.
        sample: its number in the data set.
        value: the sample as the model gets it, a batch of one: tensors of shape [1, ...], texts.
    """
    for part, content in _parts(value):
        path = folder / f"step-{step}-sample-{sample}{part}"
        if isinstance(content, str):
            path.with_name(f"{path.name}.txt").write_text(content, encoding="utf-8")
        elif isinstance(content, Tensor) and _is_picture(content):
            _write_picture(path.with_name(f"{path.name}.png"), content)
        else:
            torch.save(content, path.with_name(f"{path.name}.pt"))


def _parts(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [it for key, inner in value.items() for it in _parts(inner, f"{name}-{str(key).replace('/', '-')}")]
    if isinstance(value, (list, tuple)):
        return [it for key, inner in enumerate(value) for it in _parts(inner, f"{name}-{key}")]
    return [(name, value[0].detach().cpu().clone() if isinstance(value, Tensor) else value)]


def _is_picture(tensor: Tensor) -> bool:
    """Whether it is of shape [1 or 3, H, W] with values that a PNG can hold: bytes, or finite numbers."""
    if tensor.dim() != 3 or tensor.shape[0] not in (1, 3) or min(tensor.shape[1:]) < 2:
        return False
    return tensor.dtype == torch.uint8 or (tensor.is_floating_point() and bool(tensor.isfinite().all()))


def _write_picture(path: Path, tensor: Tensor) -> None:
    """Numbers are stretched to 0 .. 255 from the least to the greatest of this picture."""
    from PIL import Image

    if tensor.dtype != torch.uint8:
        low, high = tensor.min(), tensor.max()
        tensor = ((tensor - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    pixels = tensor.permute(1, 2, 0).numpy()
    Image.fromarray(pixels[:, :, 0] if tensor.shape[0] == 1 else pixels).save(path)

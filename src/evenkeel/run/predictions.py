"""predictions/SET.json of a run: the predictions of the last evaluation, by --save-predictions, for a report.

    {"set": "test", "step": 460, "classes": ["0", ...] or null, "targets": [...], "predictions": [...],
     "confidences": [...], "worst": [{"index", "target", "prediction", "confidence", "image"}, ...]}

Sample i is the i-th of each list, and classes are numbers. `worst` are the most confidently wrong; an image is a PNG in
base64, or null where a sample is none.
"""

from __future__ import annotations

import base64
import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.files import write_json
from ..training.evaluation import Evaluation

log = logging.getLogger(__name__)

WORST = 24
"""Maximum number of stored images."""

PIXELS = 64
"""Maximum width and height of such an image in pixels."""


def save_predictions(folder: Path, step: int, evaluation: Evaluation, rows: dict[str, Tensor]) -> None:
    """Write the result of `prediction.predictions` for a set. A failure costs the file, not the run."""
    try:
        folder.mkdir(exist_ok=True)
        found = _collected(step, evaluation, rows)
        write_json(folder / f"{evaluation.name}.json", found, indent=None)  # a line for each number would be long
    except Exception as error:  # a full disk, a predict() without probabilities or targets, an unreadable sample
        log.error("--save-predictions: %s/%s.json: %s: %s", folder, evaluation.name, type(error).__name__, error)


def _collected(step: int, evaluation: Evaluation, rows: dict[str, Tensor]) -> dict[str, Any]:
    targets, predicted, confidences = rows["target"], rows["prediction"][:, 0], rows["confidence"][:, 0]
    wrong = ((predicted != targets) & (targets >= 0)).nonzero().flatten()
    worst = wrong[confidences[wrong].argsort(descending=True, stable=True)][:WORST].tolist()
    names = evaluation.task.class_names()
    found: dict[str, Any] = {
        "set": evaluation.name,
        "step": step,
        "classes": names and list(names),
        "targets": targets.tolist(),
        "predictions": predicted.tolist(),
        "confidences": [round(value, 6) for value in confidences.tolist()],
    }
    found["worst"] = [
        {
            "index": index,
            **{name[:-1]: found[name][index] for name in ("targets", "predictions", "confidences")},
            "image": _png(evaluation.dataset[index]),
        }
        for index in worst
    ]
    return found


def _png(sample: Any) -> str | None:
    """The image of an (image, label) sample: uint8, or floats of any range, [C, H, W] with one or three channels."""
    from PIL import Image

    image = sample[0] if isinstance(sample, (tuple, list)) else None
    if not isinstance(image, Tensor) or image.dim() != 3 or len(image) not in (1, 3):
        return None
    if image.dtype != torch.uint8:
        low, high = image.double().min(), image.double().max()
        image = ((image.double() - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8)
    picture = Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy())
    picture.thumbnail((PIXELS, PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()

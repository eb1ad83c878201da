"""predictions/SET.json of the last evaluation, by --save-predictions: which class was predicted as which."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.files import alike, read_json

PNG = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]*={0,2}")
"""The base64 of a PNG file. Only this is allowed into a page."""

MOST_CLASSES = 1000
"""A larger matrix is not readable."""

MISTAKE: dict[str, Any] = {"index": 0, "target": 0, "prediction": 0, "confidence": 0.0, "image": ""}


@dataclass
class Classified:
    """The predictions for one set of samples, e.g. "test".

    Attributes:
        confusion: [target, prediction] -> number of samples.
        worst: the mistakes the model was surest of, as in the file; each image is base64 of a PNG.
    """

    part: str
    step: int
    classes: list[str]
    confusion: npt.NDArray[np.int64]
    worst: list[dict[str, Any]]

    @property
    def recall(self) -> npt.NDArray[np.float64]:
        """Per-class accuracy: the share of a class's samples that were found; NaN of a class without samples."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.confusion.diagonal() / self.confusion.sum(1))


def read_classified(run: Path) -> list[Classified]:
    """All sets with predictions of classes, in order of their names; other files are left out."""
    found = (_read(path) for path in sorted((run / "predictions").glob("*.json")))
    return [it for it in found if it]


def _read(path: Path) -> Classified | None:
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    targets: Any = content.get("targets")
    predictions: Any = content.get("predictions")
    if not alike(targets, [-1]) or not alike(predictions, [0]) or len(targets) != len(predictions):
        return None
    known = [number for number, target in enumerate(targets) if target >= 0]  # -1: an image that did not decode
    if not known:
        return None
    targets, predictions = ([numbers[number] for number in known] for numbers in (targets, predictions))
    named, most = alike(content.get("classes"), [""]), max(*targets, *predictions)
    classes = content["classes"] if named else [str(it) for it in range(min(most, MOST_CLASSES) + 1)]
    number = len(classes)
    if not most < number <= MOST_CLASSES:
        return None
    confusion = np.zeros((number, number), dtype=np.int64)
    np.add.at(confusion, (targets, predictions), 1)
    step = content.get("step")
    return Classified(path.stem, step if type(step) is int else 0, classes, confusion, _mistakes(content, number))


def _mistakes(content: dict[str, Any], number: int) -> list[dict[str, Any]]:
    worst = content.get("worst")
    found = [it for it in worst if alike(it, MISTAKE)] if isinstance(worst, list) else []
    labels = ("target", "prediction")
    return [it for it in found if PNG.fullmatch(it["image"]) and all(0 <= it[label] < number for label in labels)]

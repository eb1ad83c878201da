"""Samples of a step as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from evenkeel.time_travel.look import row_of
from evenkeel.time_travel.save import save_sample


def test_pictures_text_and_tensors(tmp_path: Path) -> None:
    pictures = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    grey = torch.rand(2, 1, 4, 5)
    bad = torch.full((2, 1, 4, 5), torch.nan)
    batch = {"image": pictures, "grey": grey, "bad": bad, "label": torch.tensor([7, 8]), "text": ["a", "b"]}
    save_sample(tmp_path, 4, 37, {**row_of(batch, 1, 2), "text": "b"})
    assert sorted(path.name.removeprefix("step-4-sample-37-") for path in tmp_path.iterdir()) == [
        "bad.pt", "grey.png", "image.png", "label.pt", "text.txt",
    ]  # fmt: skip
    found = np.asarray(Image.open(tmp_path / "step-4-sample-37-image.png"))
    assert (found == pictures[1].permute(1, 2, 0).numpy()).all()
    assert np.asarray(Image.open(tmp_path / "step-4-sample-37-grey.png")).max() == 255
    assert torch.load(tmp_path / "step-4-sample-37-bad.pt", weights_only=True).isnan().all()
    assert torch.load(tmp_path / "step-4-sample-37-label.pt", weights_only=True) == 8
    assert (tmp_path / "step-4-sample-37-text.txt").read_text() == "b"

"""The UCI optical digits that come with Evenkeel (assets/digits.md), so that a first run needs no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ..data.dataset import InMemory

TEST_SAMPLES = 360


def digits(train: bool) -> InMemory:
    """Images, uint8 [N, 1, 8, 8], and labels, int64 [N]: 1,437 to train on, or the other 360."""
    with np.load(Path(__file__).parents[1] / "assets" / "digits.npz") as data:
        images, labels = torch.from_numpy(data["images"]), torch.from_numpy(data["labels"])
    # neighbours in the file share a writer, so both parts are drawn from all of it
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    part = order[TEST_SAMPLES:] if train else order[:TEST_SAMPLES]
    white = images[part].float().mul_(255 / 16).round_()  # there are 17 shades in the file
    return InMemory(white.to(torch.uint8).unsqueeze(1), labels[part].long())

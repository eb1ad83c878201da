"""Faults that `chaos --faults bitflip` plants: a GPU that computes wrong, or memory that loses a bit.

Only a job with the environment variable has them. It names a file, which a rank takes once it is there:
`{"rank": 1, "where": "gradient", "sticky": false, "seed": 7, "step": 0}`. The fault is then in that process.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..common.naming import BIT_FLIPS


class BitFlips:
    """A fault of this rank: one bit of one parameter, or of its gradient, once or on every use.

    Args:
        path: the file that says which.
        rank: this one.
        parameters: of the model.
    """

    def __init__(self, path: Path, rank: int, parameters: Sequence[Tensor]) -> None:
        self._path, self._rank, self._parameters = path, rank, parameters
        self._fault: dict[str, Any] = {}
        self._active = False

    @staticmethod
    def planted(rank: int, parameters: Sequence[Tensor]) -> BitFlips | None:
        """What the environment names; usually None."""
        path = os.environ.get(BIT_FLIPS)
        return BitFlips(Path(path), rank, parameters) if path else None

    def begin(self, step: int) -> None:
        """Take a fault that is meant for this rank, and do it if it is one in a weight."""
        with suppress(OSError, ValueError):
            fault = json.loads(self._path.read_text())
            if fault["rank"] == self._rank:
                self._path.unlink()
                self._fault = fault
        self._active = step >= self._fault.get("step", 0)
        if self._active and self._fault.get("where") == "weight":
            self._flip(self._chosen())

    def strike(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], again: bool = False) -> None:
        """Do a fault in a gradient; in a micro-batch that is computed again only one that is sticky."""
        if not self._active or self._fault.get("where") != "gradient" or (again and not self._fault["sticky"]):
            return
        chosen = self._chosen()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter is chosen and gradient is not None:
                self._flip(gradient)

    def _chosen(self) -> Tensor:
        return random.Random(self._fault["seed"]).choice(self._parameters)

    @torch.no_grad()
    def _flip(self, tensor: Tensor) -> None:
        dice, live = random.Random(self._fault["seed"] + 1), tensor.detach()
        place = tuple(int(i) for i in np.unravel_index(dice.randrange(live.numel()), tuple(live.shape)))
        cell = live[place].reshape(1).cpu().clone()
        bit = dice.randrange(8 * cell.element_size())
        cell.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        live[place] = cell[0].to(live.device)
        self._fault = self._fault if self._fault["sticky"] else {}

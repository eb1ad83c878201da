"""The committed state: all that a run is between two optimizer steps.

Model, optimizers and one integer, the step. Everything else (sample order, random numbers, learning rate) is
a pure function of the options and the step. There is no world size and no rank in it, so a state written by
eight ranks is the state of a run on one.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import Refusal


@dataclass
class State:
    """The live objects that a step changes, the same on every rank after each step."""

    model: nn.Module
    """The bare model, not its DDP wrapper, so that saved names carry no `module.` prefix."""
    optimizers: list[Optimizer]
    step: int = 0
    """Optimizer steps done."""
    whole: bool = True
    """False while optimizers are at work: half a step is nothing to save."""

    def clear_gradients(self) -> None:
        """Forget the last step's gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def commit(self) -> None:
        """Take the step that the gradients say. Afterwards every rank holds the same state again."""
        self.whole = False
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        self.whole = True

    def capture(self) -> dict[str, Any]:
        """References to the state as nested dicts of tensors and plain data; copy before the next step."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Become what :meth:`capture` gave, whatever device that was on."""
        self.model.load_state_dict(captured["model"])
        for optimizer, saved in zip(self.optimizers, captured["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = captured["step"]


def load_weights(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file that holds a bare state dict.

    Raises:
        Refusal: the file is not one, or its weights do not fit the model.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    except (OSError, RuntimeError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        raise Refusal(f"--init-from {path}: {error}") from None


def cpu_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict on the CPU, for a file that loads anywhere."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def sha256(weights: Mapping[str, Tensor]) -> str:
    """A fingerprint of a state dict: names, types, shapes and every bit of every tensor."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

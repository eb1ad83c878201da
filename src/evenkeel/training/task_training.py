"""How a task overrides its steps: its optimizers, their rates, and its own state besides the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..config import Config
from .optimization import build_optimizers, rate
from .recomputation import repeated_blocks
from .schedulers import Scheduler


class TaskTraining:
    """The part of a task that defines its steps; each method has a default."""

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        """Default: the one of --optimizer over all parameters (with muon two). A task with several networks may return
        one for each."""
        return build_optimizers(model, config)

    def schedulers(self, optimizers: list[Optimizer], config: Config) -> Sequence[Scheduler]:
        """torch's schedulers of these optimizers, instead of `rates`; default: none. `config.max_steps` is the
        run's number of steps.

        Each is stepped after each optimizer step; one returned as (scheduler, "evaluation"), and any ReduceLROnPlateau,
        after each evaluation. ReduceLROnPlateau gets the metric of `best`. Their state is saved with the step.
        """
        return []

    def rates(self, config: Config, step: int, total_steps: int) -> float | Sequence[float]:
        """The factor on the peak learning rates at a step, or a list with one for each optimizer."""
        return rate(config, step, total_steps)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose activations --checkpoint-activations computes again in the backward pass. Default: the
        modules, except single layers, of which an `nn.Sequential` or `nn.ModuleList` has two or more of one class. A
        block's result must depend on its inputs, weights, buffers and seeded random numbers only."""
        return repeated_blocks(model)

    def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
        """Called after each optimizer step, before it can be saved: once on every rank with the same values, without
        gradients, and not for a skipped step. Change the state that `state_dict` returns here.

        Args:
            model: with the new weights, in evaluation mode. Its modes and buffers are restored afterwards.
            step: steps done.
            losses: "loss", the mean over the global batch, and its parts by name.
        """

    def state_dict(self) -> dict[str, Any]:
        """State that must survive a stop: numbers, strings, tensors, lists and dicts. Saved with each step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; tensors are on the CPU."""

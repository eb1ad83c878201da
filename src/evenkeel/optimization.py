"""Optimizers and the learning rate, which is a pure function of the step and so has no state to save."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import cos, inf, pi
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .config import Config
from .errors import Ended

log = logging.getLogger(__name__)

WAYS = ("foreach", "fused", "capturable")
"""Options of torch's optimizers that choose an implementation."""


def build_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> Optimizer:
    """The optimizer that --optimizer, --lr and --weight-decay describe, over all parameters that learn.

    Parameters of fewer than two dimensions (norms, biases) are not decayed, unless --decay-norms says so: to pull a
    norm's scale towards 0 regularises nothing. They are a group of their own, after the other.
    """
    learning = [p for p in parameters if p.requires_grad]
    lr, decay = config.lr, config.weight_decay
    groups: list[dict[str, Any]] = [{"params": learning}]
    if decay and not config.decay_norms:
        matrices, others = ([p for p in learning if (p.dim() >= 2) is many] for many in (True, False))
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    # fused ones keep all their state on the device (the host's would be ahead of a GPU that hangs), and can leave a
    # step out by themselves
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in learning) or None
    if config.optimizer == "sgd":
        return SGD(groups, lr=lr, momentum=0.9, nesterov=True, weight_decay=decay, fused=fused)
    return (Adam if config.optimizer == "adam" else AdamW)(groups, lr=lr, weight_decay=decay, fused=fused)


def rate(config: Config, step: int, total_steps: int) -> float:
    """The factor on the peak learning rate at a step: a linear rise, then the schedule's fall.

    Args:
        config: its warmup_steps and schedule.
        step: 0 .. total_steps-1.
        total_steps: the run's length; most schedules would reach 0 at this step.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.schedule == "step":
        return float(0.1 ** int(3 * progress))
    if config.schedule == "poly":
        return float((1 - progress) ** 0.9)
    return 1 - progress if config.schedule == "linear" else (1 + cos(pi * progress)) / 2


class Rates:
    """Sets the learning rates in each step, and says so, once, if something else has set them, which has no effect.

    Args:
        optimizers: all that step together.
        begun: the run has taken steps, in which their rates were set.
    """

    def __init__(self, optimizers: Sequence[Optimizer], begun: bool = False) -> None:
        self.optimizers = optimizers
        self._known = {id(group): _mark(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups}
        self._told = False
        # torch's schedulers put it there
        if not begun and any("initial_lr" in group for optimizer in optimizers for group in optimizer.param_groups):
            self._tell()

    def set(self, factors: float | Sequence[float]) -> None:
        """Set every parameter group's learning rate to its own peak times a factor.

        Args:
            factors: one for all, or each optimizer's own.

        Raises:
            Ended: they are anything else.
        """
        for optimizer, factor in zip(self.optimizers, self._each(factors), strict=True):
            for group in optimizer.param_groups:
                lr, key = group["lr"], id(group)
                mark = _mark(lr)
                if self._known.get(key, mark) != mark:
                    self._tell()
                # the peak is kept in the group, as torch's schedulers do, so that it travels with the state
                lr = group["lr"] = group.setdefault("initial_lr", lr) * factor
                self._known[key] = _mark(lr)

    def _each(self, factors: Any) -> list[float]:
        if type(factors) is float and 0 <= factors < inf:  # as nearly always
            return [factors] * len(self.optimizers)
        found = factors.tolist() if hasattr(factors, "tolist") else factors  # a checkpoint must not get NumPy's
        each = found if isinstance(found, (list, tuple)) else [found] * len(self.optimizers)
        numbers = all(isinstance(factor, Real) and 0 <= float(factor) < inf for factor in each)
        if not numbers or len(each) != len(self.optimizers):
            raise Ended(
                f"rates() returned {factors!r}: it must return one factor on the peak learning rates, at least 0 and "
                f"finite, or a list with one for each of the {len(self.optimizers)} optimizers"
            )
        return list(map(float, each))

    def _tell(self) -> None:
        if not self._told:
            log.warning(
                "something besides rates() has set a learning rate, a scheduler perhaps: that has no effect, because "
                "rates() sets them all in each step; override rates() in the task instead"
            )
        self._told = True


def _mark(lr: float | Tensor) -> object:
    """What changes when a learning rate is set; a tensor's without asking its device."""
    return (id(lr), lr._version) if isinstance(lr, Tensor) else lr


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], model: nn.Module) -> None:
    """Give an optimizer a saved state, but for how it was computed, which depends on the device and not on the run.

    A run that was made when all parameters were one group has all of them decayed, and goes on so.

    Raises:
        Ended: the saved groups of parameters are others.
    """
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if sizes == [sum(ours)] != ours:
        _merge_groups(optimizer, model)
    elif sizes != ours:
        raise Ended(
            f"the checkpoint's optimizer has groups of {sizes} parameters and this one has {ours}: the code of the "
            "task or of the optimizer has changed; continue with what it was, or start over with --fresh"
        )
    ways = [{way: group[way] for way in WAYS if way in group} for group in optimizer.param_groups]
    groups = [group | way for group, way in zip(saved["param_groups"], ways, strict=True)]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            # fused optimizers go through memory in its order, and with channels last the saved one may be another
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                kept[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _merge_groups(optimizer: Optimizer, model: nn.Module) -> None:
    """Make one group of all, in the order of the model's parameters."""
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    first, *others = optimizer.param_groups
    first["params"] = [p for p in model.parameters() if id(p) in theirs]
    for group in others:
        optimizer.param_groups.remove(group)

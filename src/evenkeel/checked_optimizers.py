"""What a task's `optimizers` returns, refused in a line where it would train nothing, or not the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from .errors import Refusal
from .mistakes import kind_of, listed


def checked_optimizers(returned: Any, model: nn.Module) -> list[Optimizer]:
    """A task's optimizers, if they train the model.

    Args:
        returned: a list of them, or one.
        model: whose parameters they must have, each in one of them at most.

    Raises:
        Refusal: they do not, or cannot be stepped or saved.
    """
    if isinstance(returned, Optimizer):
        return checked_optimizers([returned], model)
    if not isinstance(returned, (list, tuple)):
        raise Refusal(f"optimizers() returned {kind_of(returned)}: it must return a list of torch.optim.Optimizer")
    if not returned:
        raise Refusal("optimizers() returned an empty list: nothing would be trained; return at least one")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: dict[int, int] = {}
    for number, optimizer in enumerate(returned):
        which = f"optimizers()[{number}]"
        if not isinstance(optimizer, Optimizer):
            raise Refusal(
                f"{which} is {kind_of(optimizer)}: it must be a torch.optim.Optimizer; learning rates follow rates()"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure and closure.default is closure.empty:  # LBFGS
            raise Refusal(f"{which} is {kind_of(optimizer)}, whose step() needs a closure: take another one")
        for group in optimizer.param_groups:
            _refuse_numpy(which, group)
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    raise Refusal(
                        f"{which} has a parameter of shape {list(parameter.shape)} that is none of the model's: it "
                        "would never be saved; make optimizers from the `model` that the method gets"
                    )
                if (first := taken.setdefault(id(parameter), number)) != number:
                    raise Refusal(
                        f"{name} is in optimizers()[{first}] and in {which}: both would step it; leave it to one"
                    )
    return list(returned)


def left_out(model: nn.Module, optimizers: list[Optimizer]) -> str:
    """The parameters that need a gradient and never move, in a line; empty if there are none."""
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    if not missing:
        return ""
    return (
        f"no optimizer has {listed(missing)}: they will stay as they are, although gradients are computed for them; "
        "give them to one in optimizers(), or let requires_grad be False"
    )


def _refuse_numpy(which: str, group: Mapping[str, Any]) -> None:
    """Refuse numbers that a checkpoint would not give back: torch.load with weights_only knows none of NumPy's."""
    for name, value in group.items():
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(part, np.generic):
                raise Refusal(
                    f"{which} has {name} = {part!r}, a number of NumPy's, which a checkpoint would not give back: make "
                    "it Python's, by float()"
                )

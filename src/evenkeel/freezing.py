"""Parts of a model that do not learn."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from .errors import Refusal


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the gradient from parts of a model, and put the modules among them into evaluation mode.

    Args:
        model: before its optimizers are made.
        patterns: names of modules, which mean all within, or of parameters; with * for any text.

    Raises:
        Refusal: nothing has that name, or nothing would learn.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        inside = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        alone = [parameter for name, parameter in parameters.items() if fnmatchcase(name, pattern)]
        if not inside and not alone:
            near = get_close_matches(pattern, [*modules, *parameters], n=3, cutoff=0.4)
            names = near or [name for name, _ in model.named_children()] or list(parameters)
            raise Refusal(
                f"--freeze {pattern}: no module or parameter has that name; "
                f"{'the nearest' if near else 'there'} are: {', '.join(names[:5])}"
            )
        for module in inside:
            module.eval().requires_grad_(False)
        for parameter in alone:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise Refusal(f"--freeze {' '.join(patterns)}: leaves nothing that learns; name fewer parts")

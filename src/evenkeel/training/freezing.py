"""Parts of a model that do not learn."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import Refusal
from ..common.naming import kind_of, listed


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Set requires_grad to False for parts of a model, and put the modules among them into evaluation mode.

    Args:
        model: before its optimizers are built.
        patterns: names of modules (with all they contain) or of parameters; * stands for any text.
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
            module.eval()
        for part in (*inside, *alone):
            part.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise Refusal(f"--freeze {' '.join(patterns)}: nothing would be left to train; name fewer parts")


def left_out(names: Mapping[Tensor, str], optimizers: list[Optimizer]) -> str:
    """A message with those parameters that require a gradient but have no optimizer; empty if there are none."""
    stepped = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    missing = [name for p, name in names.items() if p.requires_grad and p not in stepped]
    if not missing:
        return ""
    return (
        f"no optimizer has {listed(missing)}: they will not change, although gradients are computed for them; "
        "add them to one in optimizers(), or set requires_grad to False"
    )


def left_evaluating(model: nn.Module) -> str:
    """A message with those parts that learn but are in evaluation mode, as `from_pretrained` of transformers returns
    them; empty if there are none. Single layers, such as a BatchNorm, do not count: who wants that sets it."""
    if not (names := list(_evaluating(model))):
        return ""
    return (
        f"evaluation mode of {listed(names)}: no dropout, and BatchNorm's statistics do not move, although the weights "
        "learn; call .train() in model(), as after from_pretrained(), unless that is intended"
    )


def unregistered(model: nn.Module) -> str:
    """A message with those lists and dicts of the model whose layers should learn, but are not among its parts; empty
    if there are none."""
    known, found = set(model.parameters()), []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            layers = nn.ModuleList(it for it in items if isinstance(it, nn.Module))
            if any(parameter.requires_grad and parameter not in known for parameter in layers.parameters()):
                found.append(f"{name}.{attribute}" if name else attribute)
    if not found:
        return ""
    return (
        f"a plain list or dict of the model has layers ({listed(found)}), which are not trained, stored or moved to a "
        "GPU; use nn.ModuleList or nn.ModuleDict"
    )


def refuse_owned(task: object, model: nn.Module) -> None:
    """Refuse weights that learn and that the task has in its attributes, but `model()` does not return."""
    known = set(model.parameters())
    for name, value in [it for owner in (task, *type(task).__mro__) for it in vars(owner).items()]:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        parts = nn.ModuleList(it for it in items if isinstance(it, nn.Module)).parameters()
        weights = [*parts, *(it for it in items if isinstance(it, nn.Parameter))]
        if any(it.requires_grad and it not in known for it in weights):
            raise Refusal(
                f"self.{name} of the task has weights that require a gradient: they would not be trained or saved, and "
                "each rank would have its own; return it from model(), in an nn.ModuleDict with the network, or, if it "
                f"must not learn, set requires_grad to False in it (self.{name}.requires_grad_(False))"
            )


def refuse_merging(model: nn.Module) -> None:
    """Refuse modules whose `eval()` changes parameters, as those of loralib: an evaluation would change the weights."""
    for name, module in model.named_modules():
        if getattr(type(module).train, "__module__", "").startswith("torch.") or next(module.children(), None):
            continue
        changes = False
        with suppress(Exception), torch.no_grad():  # of a module that cannot be copied others speak
            tried = copy.deepcopy(module).train()
            for parameter in tried.parameters():
                parameter.fill_(1)  # a merged part may begin as zeros
            changes = not all(bool((it == 1).all()) for it in tried.eval().parameters())
        if changes:
            raise Refusal(
                f"{name or 'the model'} is {kind_of(module)}, whose eval() changes parameters, so each evaluation "
                "would change the training: switch that off (merge_weights=False in loralib)"
            )


def _evaluating(module: nn.Module, name: str = "") -> Iterator[str]:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return
    if module.training:
        for part, child in module.named_children():
            yield from _evaluating(child, f"{name}.{part}" if name else part)
    elif next(module.children(), None):
        yield name or "the model"

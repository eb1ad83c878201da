"""--checkpoint-activations: blocks of the model drop their activations and compute them again in the backward pass.

The memory is that of the blocks' inputs and of one block's activations, for one more forward pass (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174). `torch.utils.checkpoint` repeats autocast and
torch's random numbers. Here the second pass also begins with the block's buffers, weights and modes of the first one,
and does not change them. Otherwise BatchNorm's running statistics would move twice in a step.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..common.errors import Refusal
from ..common.naming import kind_of

CONTAINERS = (nn.Sequential, nn.ModuleList)
OPTION = "--checkpoint-activations"
FORWARD_READS = ("training", "_parameters", "_buffers")
"""Attributes of a module that its forward pass reads, besides its submodules."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are repeated in a Sequential or ModuleList: two or more of one class in the same one.

    Layers without parts, such as nn.Linear, are no blocks, because recomputing one saves nothing. A block's own parts
    are not listed, except if the block is itself a Sequential or ModuleList of blocks, as the stages of a ConvNeXt.

    >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    >>> len(repeated_blocks(nn.Sequential(*layers, nn.Linear(4, 1))))
    3
    """
    children = list(model.children())
    kinds = [type(child) for child in children if _is_composed(child)] if isinstance(model, CONTAINERS) else []
    found: list[nn.Module] = []
    for child in children:
        repeated = _is_composed(child) and kinds.count(type(child)) > 1
        inner = [] if repeated and type(child) not in CONTAINERS else repeated_blocks(child)
        found += inner or ([child] if repeated and type(child) is not nn.ModuleList else [])
    return list(dict.fromkeys(found))


def _is_composed(module: nn.Module) -> bool:
    """Whether a module may have activations besides its input and output."""
    has_parts = any(True for _ in module.children())
    return has_parts or (bool(module._parameters) and not type(module).__module__.startswith("torch.nn."))


def recompute(model: nn.Module, blocks: Any) -> None:
    """Make blocks of a model recompute their activations, in place; names in the state dict do not change.

    Args:
        model: on its devices.
        blocks: the result of a task's `blocks`.

    Raises:
        Refusal: there are no blocks, or some cannot be recomputed.
    """
    if not isinstance(blocks, (list, tuple)):
        raise Refusal(f"{OPTION}: blocks() returned {kind_of(blocks)}: it must return a list of modules of the model")
    if not blocks:
        raise Refusal(
            f"{OPTION}: {kind_of(model)} has no repeated blocks in an nn.Sequential or nn.ModuleList; define "
            "blocks(model) in the task and return the modules to recompute, or leave the option out"
        )
    names = {id(module): name for name, module in model.named_modules()}
    for number, block in enumerate(blocks):
        if id(block) not in names:
            raise Refusal(f"{OPTION}: blocks()[{number}] is {kind_of(block)}, and no module of the model")
        name = names[id(block)] or "the model"
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
            raise Refusal(f"{OPTION}: {name} is {kind_of(block)}, which is never called; return its modules instead")
        if "forward" in vars(block):  # a call would use it, and not the class's
            raise Refusal(
                f"{OPTION}: {name} has a forward() that was assigned to the module itself, and only its class's can be "
                "computed again; define it in a class, or leave the module out of blocks()"
            )
        if any(isinstance(module, torch.jit.ScriptModule) for module in block.modules()):
            raise Refusal(f"{OPTION}: {name} is or has a module of torch.jit.script; leave it out of blocks()")
        if len({parameter.device for parameter in block.parameters()}) > 1:
            raise Refusal(f"{OPTION}: --model-parallel cuts {name} in two; return smaller blocks, or leave one out")
    if any(module._compiled_call_impl for module in model.modules()):
        raise Refusal(
            f"{OPTION}: the compiler itself decides what to compute again; leave torch.compile out of model()"
        )
    for block in dict.fromkeys(blocks):
        # unlike a wrapper or a new `forward`, a class is also right for copies, such as DataParallel's replicas
        block.__class__ = _recomputing(type(block))  # type: ignore[arg-type]


def without_recomputation(model: nn.Module) -> nn.Module:
    """Undo :func:`recompute`, in place."""
    for module in model.modules():
        module.__class__ = vars(type(module)).get("_recomputes", type(module))
    return model


@functools.cache
def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of modules with the same name, whose forward pass is repeated in the backward pass."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = functools.partial(kind.forward, self)
        return _checkpointed(self, plain, args, kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {"forward": forward, "_recomputes": kind, **names})


def _checkpointed(block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # flat, because torch frees the inputs, and finds the GPUs whose random numbers it must repeat, only in arguments
    # that are tensors themselves; the parameter says the GPU where no input does
    inputs, structure = tree_flatten((args, kwargs))
    snapshot, passes = _Snapshot(block), 0

    def run(_parameter: Tensor | None, *inputs: Any) -> Any:
        nonlocal passes
        passes += 1
        args, kwargs = tree_unflatten(inputs, structure)
        if passes == 1:
            return forward(*args, **kwargs)
        with snapshot.restored():
            return forward(*args, **kwargs)

    return checkpoint(run, next(block.parameters(), None), *inputs, use_reentrant=False, preserve_rng_state=True)


class _Snapshot:
    """What a block reads besides its inputs, as it is before a forward pass."""

    def __init__(self, block: nn.Module) -> None:
        # other tensors may stand in for the parameters, by torch.func.functional_call for example
        self._modules = [(module, _attributes(module)) for module in block.modules()]
        buffers = {id(it): it for _, read in self._modules for it in read["_buffers"].values() if it is not None}
        # all of them: BatchNorm does not count its changes in the tensors' versions
        self._buffers = dict(zip(buffers, _copies(list(buffers.values())), strict=True))
        self._generators = random.getstate(), np.random.get_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """In this context the block is as it was then, with copies of its buffers. May be entered several times."""
        now = [{name: module.__dict__[name] for name in FORWARD_READS} for module, _ in self._modules]
        generators = random.getstate(), np.random.get_state()
        copies = dict(zip(self._buffers, _copies(list(self._buffers.values())), strict=True))
        try:
            for module, read in self._modules:
                buffers = {name: copies.get(id(it), it) for name, it in read["_buffers"].items()}
                module.__dict__.update(read, _buffers=buffers)
            _set_generators(*self._generators)
            yield
        finally:  # torch leaves the second pass by an exception when it has all that it needs
            for (module, _), was in zip(self._modules, now, strict=True):
                module.__dict__.update(was)
            _set_generators(*generators)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What the forward pass reads of a module: copies of the dicts, not of the tensors."""
    found = {name: module.__dict__[name] for name in FORWARD_READS}
    return {name: dict(it) if isinstance(it, dict) else it for name, it in found.items()}


@torch.no_grad()
def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    made = [torch.empty_like(tensor) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, list(tensors))
    return made


def _set_generators(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)

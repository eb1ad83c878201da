"""A model on torch's meta device: shapes without memory. With --shard on rank 0 has the values, and sends them.

What is no registered parameter or buffer is not sent. So a model is built like this only if nothing else of it depends
on a value that is missing, or on a random number that rank 0 draws elsewhere.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..common.errors import Refusal
from .task import Task


def built_on_meta(
    task: Task, optimize: Callable[[nn.Module], object], build: Callable[[], nn.Module]
) -> tuple[nn.Module, str]:
    """The task's model with its parameters on the meta device and buffers of zeros.

    Args:
        task: whose `model` is called.
        optimize: is called with the model, because optimizers may read values too.
        build: is called if the model cannot be built so, and returns it with values.

    Returns:
        The model; and why it has values, if it has.

    Raises:
        Refusal: `model` stores tensors outside of the model, and a second call does not replace them.
    """
    before = _others([])
    built = _built(task, optimize, before)
    if not isinstance(built, str):
        return built, ""
    model = build()
    if left := _others(before):
        raise Refusal(
            f"--shard: model() of {type(task).__name__} stores a tensor of shape {list(left[0].shape)} outside of "
            "the model (in a cache?), where it would have no values; make it anew in each call"
        )
    return model, built


def _built(task: Task, optimize: Callable[[nn.Module], object], before: list[Tensor]) -> nn.Module | str:
    state = torch.get_rng_state()
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 shows them
            model = task.model()
        optimize(model)
        for buffer in model.buffers():
            if buffer.layout is not torch.strided:
                return "a buffer is not dense"
            if buffer.is_meta:
                _replace(buffer, torch.zeros_like(buffer, device="cpu"))
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    if not torch.equal(state, torch.get_rng_state()):
        return "random numbers are drawn on the CPU, where rank 0 draws others"
    if found := _others([*before, *model.parameters()]):
        return f"a tensor of shape {list(found[0].shape)} is no parameter or buffer of the model"
    return model


def materialise(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a parameter memory on a device, without values, if it is on the meta device. It stays the same object."""
    if parameter.is_meta:
        _replace(parameter, nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad))


def _replace(tensor: Tensor, real: Tensor) -> None:
    vars(real).update(vars(tensor))
    # in place, because tied modules and optimizers refer to it
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


def _others(known: list[Tensor]) -> list[Tensor]:
    """The tensors of this process on the meta device, except for these."""
    ids = {id(tensor) for tensor in known}
    if found := _on_meta(ids):
        del found
        gc.collect()  # some may only wait to be freed
        found = _on_meta(ids)
    return found


def _on_meta(without: set[int]) -> list[Tensor]:
    # not isinstance, which runs code of objects that pretend to have another class
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return [tensor for tensor in tensors if tensor.is_meta and id(tensor) not in without]

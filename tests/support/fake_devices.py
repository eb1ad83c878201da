"""Two devices on a machine that has none: tensors without data, which know their device and refuse to meet others.

torch's fake tensors go through forward and backward and raise an error where tensors of two devices meet. Their device
is called `lazy`, because the autograd engine needs a real driver for a fake `cuda`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from evenkeel.distributed.placement import Placement

DEVICES = [torch.device("lazy", number) for number in range(3)]

MEET = "on the same device|two different devices"
"""What the error says; the second in torch 2.8 to 2.11."""


def fake() -> FakeTensorMode:
    """A context in which all tensors are fake."""
    mode = FakeTensorMode()
    mode.__deepcopy__ = lambda _memo: mode  # a copy of a tensor is of the same world
    return mode


def spread(model: nn.Module, placement: Placement, devices: Sequence[torch.device] = DEVICES) -> None:
    """Put the tensors of a model where a placement says: a fake one in the place of each. Connects nothing."""

    def made(tensor: Tensor, name: str) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=devices[placement.tensors.get(name.lstrip("."), 0)])

    new: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = nn.Parameter(made(parameter, f"{prefix}.{name}"), parameter.requires_grad)
                module._parameters[name] = new.setdefault(id(parameter), fresh)
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Tensor):
                module._buffers[name] = made(buffer, f"{prefix}.{name}")

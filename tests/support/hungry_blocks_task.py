"""A network for --shard of which a block takes real memory for each sample, of which a process has so much."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from odd_tasks import MIB, bound_memory
from sharded_task import Sharded
from torch import Tensor, nn


class Room(torch.autograd.Function):
    """Takes memory from the forward to the backward pass, or in the backward pass only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, late: bool) -> Tensor:
        """Return x; `late`: take memory in the backward pass."""
        ctx.late = late
        ctx.save_for_backward(*([] if late else [room_for(x)]))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _room = room_for(gradient) if ctx.late else ctx.saved_tensors
        return gradient.clone(), None


def room_for(x: Tensor) -> Tensor:
    """550 MiB a sample: more than the 1 GiB of freed memory that the C library may keep."""
    return torch.empty(len(x) * 550 * MIB, dtype=torch.uint8)


@dataclass
class HungryBlocks(Sharded):
    """Other blocks have been gathered, or their gradients reduced, when memory runs out."""

    hungry_in: Literal["forward", "backward"] = "forward"
    bounded = False

    def model(self) -> nn.Module:
        model = super().model()
        number = int(self.hungry_in == "forward")  # the last block to be computed in that pass
        block = model.get_submodule(f"blocks.{number}")
        block.register_forward_hook(lambda _block, _inputs, output: Room.apply(output, self.hungry_in == "backward"))
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if not self.bounded:  # not before: threads and libraries have taken theirs by now
            self.bounded = True
            bound_memory()
        return super().loss(model, batch)

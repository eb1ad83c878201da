"""What a step computes, in order, as digests: to find the first operation at which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..training.digest import digests

Entry = tuple[str, str]
"""What was computed, and a digest of its bits."""


class Trace:
    """Records the batches of a step, the parameters before it, and the output of each module, in order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._number = 0

    def visit(self, model: nn.Module, batch: Any, step: int) -> None:
        """For `replay`: called before each micro-batch of the step."""
        if not self._number:
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            self.entries += [(f"{name}, before step {step}", digest) for name, digest in digests(tensors).items()]
            for name, module in model.named_modules():
                module.register_forward_hook(self._hook(f"{name} ({type(module).__name__})".strip()))
        self._number += 1
        self._add(f"the data of micro-batch {self._number}", batch)

    def _hook(self, name: str) -> Any:
        return lambda _module, _inputs, output: self._add(f"the output of {name} in micro-batch {self._number}", output)

    def _add(self, what: str, value: Any) -> None:
        tensors = {str(number): it for number, it in enumerate(tree_leaves(value)) if isinstance(it, Tensor)}
        self.entries.append((what, " ".join(digests(tensors).values())))


def first_difference(a: Sequence[Entry], b: Sequence[Entry]) -> str:
    """What two traces do not have in common first; empty if they are equal."""
    for (what, digest), (other, others) in zip(a, b, strict=False):
        if what != other:
            return f"{what} | {other}"
        if digest != others:
            return what
    return ""

"""The first operation of a forward and a backward pass whose result is not finite though its inputs are."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNSET = ("empty", "new_empty", "resize", "detach", "view", "_unsafe_view", "t", "set_")
"""Operations whose result is not computed: its bytes may be anything, or are those of an input."""


@dataclass(frozen=True)
class Culprit:
    """An operation whose result is not finite."""

    operation: str
    """As torch names it, e.g. aten.log."""
    module: str
    """The innermost module that was computing; "" outside the model."""
    line: str
    """FILE:LINE and the text of the task's line; "" in a backward pass."""
    value: str
    """nan or inf."""
    rows: tuple[int, ...]
    """Where the result has one row for each sample: the rows that are not finite."""
    given: bool
    """An input was not finite already: the data, or the weights."""


class Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Looks at the result of each operation. The first NaN counts, or the first infinity if there is no NaN.

    Args:
        samples: of the micro-batch.
        files: of the task's own code.
        module: returns the name of the module that is computing.
    """

    def __init__(self, samples: int, files: Sequence[str], module: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples, self._files, self._module = samples, files, module
        self._found: dict[str, Culprit] = {}

    @property
    def found(self) -> Culprit | None:
        """The culprit, if there is one."""
        return self._found.get("nan", self._found.get("inf"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # asked before the call, because an operation in place changes its input
        given = any(map(_bad, tree_leaves((args, kwargs)))) if "nan" not in self._found else False
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "nan" not in self._found and name not in UNSET and not name.startswith("empty"):
            for tensor in tree_leaves(result):
                if value := _bad(tensor):
                    self._found.setdefault(value, self._culprit(str(func), value, tensor, given))
        return result

    def _culprit(self, operation: str, value: str, tensor: Tensor, given: bool) -> Culprit:
        rows: tuple[int, ...] = ()
        if tensor.dim() and len(tensor) == self._samples:
            bad = ~tensor.detach().reshape(self._samples, -1).isfinite().all(1)
            rows = tuple(bad.nonzero().flatten().tolist())
        lines = [it for it in traceback.extract_stack() if it.filename in self._files]
        line = f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}" if lines else ""
        return Culprit(operation.rpartition(".")[0], self._module(), line, value, rows, given)


def _bad(value: Any) -> str:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()) or value.is_meta:
        return ""
    with torch.utils._python_dispatch._disable_current_modes():
        plain = value.detach()
        return "" if plain.isfinite().all() else "nan" if plain.isnan().any() else "inf"


@contextmanager
def watched_modules(model: nn.Module, after: Callable[[str, Any], None]) -> Iterator[Callable[[], str]]:
    """Call ``after(name, output)`` after each module's forward; yields what returns the name of the one computing."""
    computing: list[str] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def begin(_module: nn.Module, _inputs: Any, name: str = name) -> None:
                computing.append(name)

            def end(_module: nn.Module, _inputs: Any, output: Any, name: str = name) -> None:
                if computing:
                    computing.pop()
                after(name, output)

            hooks.callback(module.register_forward_pre_hook(begin).remove)
            # with --checkpoint-activations torch leaves a second pass by an exception; the output is then None
            hooks.callback(module.register_forward_hook(end, always_call=True).remove)
        yield lambda: computing[-1] if computing else ""

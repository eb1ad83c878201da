"""Data that changes while the job runs, a replay buffer that `loss` fills for example.

Such data is another on each rank and in each loader process, which has the copy of its fork, and a stop loses the
change. Nothing fails, but the result depends on all of these. So now and then the samples that each start compares are
read again, with the same random numbers: augmentation changes nothing in them.

Where loader processes read, this process must not, because a file that it opens would be shared with those that are
forked later. Then the values that a data set holds are looked at, and only if they have changed, one loader process is
forked to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..common.errors import Refusal
from ..config import Config
from .data_digest import OFTEN, ONCE, Digests, alike, look
from .dataset import SizedDataset
from .order import Listed

SAMPLED = 64
"""The most elements of a container or an array that are looked at, evenly spaced."""
MOST = 5000
"""The most objects of a data set that are looked at. A look takes some milliseconds."""
CONTAINERS = (list, tuple, deque)


class Changes:
    """Compares data sets with what they were when the attempt began.

    Args:
        config: the options.
        sets: by name. Streams are left out: they are read on, and not again.
        digests: of these sets at the start; one that has none is compared by its length only.
    """

    def __init__(self, config: Config, sets: Mapping[str, SizedDataset], digests: Digests) -> None:
        self.config = config
        self.sets = {name: it for name, it in sets.items() if not hasattr(it, "first_samples")}
        self._lengths = {name: len(it) for name, it in self.sets.items()}
        self._digests = {name: digest for name, digest in digests.items() if name in self.sets}
        self._states = self._look_at_values()

    def __call__(self) -> str:
        """Say in a line which data has changed on this rank; empty if none has."""
        for name, dataset in self.sets.items():
            if (now := len(dataset)) != (before := self._lengths[name]):
                return f"the {name} data had {before} samples when the job began and has {now} now"
        states = self._look_at_values()
        if self.config.num_workers and states == self._states:
            return ""
        self._states = states
        # samples that are drawn anew at each read are sometimes the same twice
        changed = (once := self._differs(ONCE, {})) and self._differs(OFTEN, once)
        return f"samples of the {next(iter(changed))} data are not what they were when the job began" if changed else ""

    def _differs(self, times: int, before: Digests) -> Digests:
        """Sets that are not as they were, as they are now. Those that differ between reads, or from what another loader
        process has read just `before`, its number for example, are not compared any more."""
        try:
            found, unsteady = look(self.config, {name: self.sets[name] for name in self._digests}, times)
        except Refusal:  # samples are missing
            return self._digests
        unsteady += [name for name, digest in before.items() if not alike(found.get(name, digest), digest)]
        self._digests = {name: digest for name, digest in self._digests.items() if name not in unsteady}
        return {name: found[name] for name, old in self._digests.items() if not alike(found.get(name, old), old)}

    def _look_at_values(self) -> list[Any]:
        """What the sets hold; where an object of other people's code cannot be looked at, what is never the same."""
        try:
            return list(_values(self.sets)) if self.config.num_workers else []
        except Exception:
            return [object()]


def _values(sets: Mapping[str, SizedDataset]) -> Iterator[Any]:
    """What an object holds, as values that can be compared later, at any depth."""
    waiting, seen = deque[Any]([sets]), set[int]()
    while waiting and len(seen) < MOST:
        part = waiting.popleft()
        if isinstance(part, (int, float, str, bytes, type(None))):
            yield part
        elif id(part) not in seen and not isinstance(part, (type, ModuleType, nn.Module, Listed)):
            seen.add(id(part))
            yield id(part)
            yield from _own_values(part)
            waiting.extend(_parts(part))


def _own_values(part: Any) -> Iterator[Any]:
    if isinstance(part, Tensor):
        # counts changes in place; loader processes that share its memory do not move the count of this one
        yield part.shape, None if part.is_inference() else part._version
    elif isinstance(part, np.ndarray):
        yield part.shape
        if not isinstance(part, np.memmap) and part.dtype.kind in "biufc":
            yield part.flat[:: max(1, part.size // SAMPLED)][:SAMPLED].tobytes()
    elif isinstance(part, (*CONTAINERS, dict, set)):
        yield len(part)


def _parts(part: Any) -> Iterator[Any]:
    """What is to be looked at within an object."""
    if type(part) in CONTAINERS:  # a subclass may read a file to give an element
        yield from (part[i] for i in range(0, len(part), max(1, len(part) // SAMPLED)))
    elif isinstance(part, dict):
        yield from islice(dict.values(part), SAMPLED)
    elif isinstance(part, MethodType):
        yield part.__self__
    elif isinstance(part, partial):
        yield from (part.func, part.args, part.keywords)
    elif isinstance(part, FunctionType):
        yield part.__defaults__
        yield from (cell.cell_contents for cell in part.__closure__ or ())
        variables = (part.__globals__.get(name) for name in part.__code__.co_names)
        yield from (it for it in variables if isinstance(it, (*CONTAINERS, dict, Tensor, np.ndarray)))
    elif not isinstance(part, (Tensor, np.ndarray)):
        yield from getattr(part, "__dict__", {}).values()
        yield from (getattr(type(part), name, None) for name in ("__getitem__", "__getitems__"))

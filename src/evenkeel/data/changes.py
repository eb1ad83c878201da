"""Data that changes while the job runs, for example a replay buffer that `loss` fills.

Such data differs between ranks and loader processes, which have the copy of their fork, and a stop loses the
change. Nothing fails, but the result depends on all of this. So from time to time the samples that each start compares
are read again, with the same random numbers, so that augmentation does not change them.

If loader processes read, this process must not, because processes forked later would share the files it opens.
Then the values inside a data set are compared, and only if they have changed, one loader process is forked to read the
samples.
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
from .data_digest import OFTEN, ONCE, Digests, alike, digest_samples
from .dataset import SizedDataset
from .order import Listed

SAMPLED = 64
"""Maximum number of elements of a container or an array to compare, evenly spaced."""
MOST = 5000
"""Maximum number of objects of a data set to compare. This takes some milliseconds."""
CONTAINERS = (list, tuple, deque)


class Changes:
    """Compares data sets with their state at the beginning of the attempt.

    Args:
        config: the options.
        sets: by name. Streams are left out: they cannot be read again.
        digests: of these sets at the start; a set without one is compared by its length only.
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
        # samples that are random at each read are sometimes the same twice
        changed = (once := self._differs(ONCE, {})) and self._differs(OFTEN, once)
        return f"samples of the {next(iter(changed))} data are not what they were when the job began" if changed else ""

    def _differs(self, times: int, before: Digests) -> Digests:
        """The digests of sets that have changed. Sets that differ between reads, or between loader processes (`before`
        is another one's read), because a sample has the worker's number for example, are not compared any more."""
        try:
            found, unsteady = digest_samples(self.config, {name: self.sets[name] for name in self._digests}, times)
        except Refusal:  # samples are missing
            return self._digests
        unsteady = [name for name in unsteady if name not in found]  # a small difference between reads may be noise
        unsteady += [name for name, digest in before.items() if not alike(found.get(name, digest), digest)]
        self._digests = {name: digest for name, digest in self._digests.items() if name not in unsteady}
        return {name: found[name] for name, old in self._digests.items() if not alike(found.get(name, old), old)}

    def _look_at_values(self) -> list[Any]:
        """The values in the sets; if this fails in an object of a user's code, a value that always differs."""
        try:
            return list(_values(self.sets)) if self.config.num_workers else []
        except Exception:
            return [object()]


def _values(sets: Mapping[str, SizedDataset]) -> Iterator[Any]:
    """The values in an object at any depth, in a form that can be compared later."""
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
        # counts changes in place; changes by loader processes that share the memory are not counted
        yield part.shape, None if part.is_inference() else part._version
    elif isinstance(part, np.ndarray):
        yield part.shape
        if not isinstance(part, np.memmap) and part.dtype.kind in "biufc":
            yield part.flat[:: max(1, part.size // SAMPLED)][:SAMPLED].tobytes()
    elif isinstance(part, (*CONTAINERS, dict, set)):
        yield len(part)


def _parts(part: Any) -> Iterator[Any]:
    """The objects inside an object to compare."""
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

"""From a data set to the micro-batches of this rank.

torch's `DistributedSampler` deals samples out like cards, so who gets which depends on the number of players;
after a stop, "skip the first k batches" is right only if as many sit down again, and even torch's own
`ElasticDistributedSampler` skips and repeats samples otherwise. Here the cut comes first and the
dealing last: an epoch is cut into steps and micro-batches without looking at the ranks (`plan`), and
each rank takes its share of the pieces.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import inspect
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from functools import cache
from itertools import accumulate, islice
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import is_initialized
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from .errors import Ended, EndedByData, no_exit
from .mistakes import Uncollated, exhausted, explain_samples, is_out_of_memory, length
from .order import shuffled
from .plan import MicroBatch, Plan
from .processes import STOP_SIGNALS, die_with_parent
from .randomness import derive, seed_host, seed_task

if TYPE_CHECKING:
    from .config import Config
    from .tasks import Task


class SizedDataset(Protocol):
    """Any map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


LONGEST_SOCKET = 103
"""Bytes that the path of a socket may have, on macOS; on Linux 107."""

BLOCK = 4096
"""Positions whose samples the sampler computes at once, or a micro-batch if that is more: 64 alone cost 150 us, 64 of
so many 10 us."""


class Indices(list[int]):
    """The samples of one micro-batch, with where they stand in the run. A plain list to any data set."""

    def __init__(self, samples: Sequence[int] | NDArray[Any], epoch: int, micro_batch: MicroBatch) -> None:
        self.array = np.asarray(samples, dtype=np.int64)
        super().__init__(self.array.tolist())
        self.epoch = epoch
        self.micro_batch = micro_batch


class ElasticSampler(DistributedSampler[Any]):
    """Deals the micro-batches of an epoch to ranks; each sample exactly once an epoch at any world size.

    Pass it to a `DataLoader` as ``batch_sampler``. It holds no state but where the next epoch starts: the
    same position at another world size continues with exactly the samples that are left, in O(1).

    Args:
        dataset: anything with a length N.
        global_batch: samples of one step over all ranks, G.
        micro_batch: samples of one batch of this loader, at most.
        micro_batches: cut each step into so many of nearly equal size; 0: by that size, the last one smaller.
        num_replicas: world size W >= 1, which need not divide anything; default: the process group's.
        rank: default: the process group's. Ranks beyond G / micro_batch get nothing.
        shuffle: a new order every epoch, or 0 .. N-1 every time.
        seed: the same on all ranks.

    Warning:
        Call :meth:`set_epoch` before every epoch, or all epochs have the same order.

    Example:
        >>> sampler = ElasticSampler(range(10), global_batch=8, micro_batch=3, num_replicas=2, rank=0, shuffle=False)
        >>> list(sampler)
        [[0, 1, 2], [3, 4, 5], [8, 9]]
        >>> sampler.set_epoch(0, first_step=1)
        >>> list(sampler)
        [[8, 9]]
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        micro_batch: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        micro_batches: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed)  # type: ignore[arg-type]
        self.plan = Plan(len(dataset), global_batch, micro_batch, epochs=1, number=micro_batches)
        self.first_step = 0

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Choose the epoch of the next iteration and the step within it to start from."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def __iter__(self) -> Iterator[Indices]:
        mine = (micro_batch for step in self.steps() for micro_batch in self.micro_batches(step))
        while block := list(islice(mine, max(1, BLOCK // self.plan.micro_batch))):
            yield from self._indices(block)

    def __len__(self) -> int:
        return sum(len(self.micro_batches(step)) for step in self.steps())

    def steps(self) -> range:
        """Global numbers of the epoch's steps that are left."""
        first = self.epoch * self.plan.steps_per_epoch
        return range(first + self.first_step, first + self.plan.steps_per_epoch)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a global step."""
        return self.plan.micro_batches(step, self.rank, self.num_replicas)

    def _indices(self, block: Sequence[MicroBatch]) -> Iterator[Indices]:
        samples = np.concatenate([np.arange(each.start, each.start + each.size, dtype=np.uint64) for each in block])
        if self.shuffle:
            samples = shuffled(samples, self.plan.samples, self.seed, self.epoch)
        for each, end in zip(block, accumulate(each.size for each in block), strict=True):
            yield Indices(samples[end - each.size : end], self.epoch, each)


class InMemory(Dataset[Any]):
    """Tensors of equal length as a data set that hands out whole micro-batches by one indexing each.

    Args:
        tensors: each of shape [N, ...].
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """A collated micro-batch, each tensor of shape [len(indices), ...]."""
        rows = torch.as_tensor(indices)
        return tuple(tensor[rows] for tensor in self.tensors)


def of_task(task: Task, config: Config, part: Literal["train", "test"]) -> SizedDataset:
    """A task's data set, the same on every rank and at every start, and no more of it than --limit-batches says.

    Raises:
        Refusal: it is not a map-style data set.
    """
    seed_task(config.seed, "data")
    dataset = task.train_dataset() if part == "train" else task.test_dataset()
    return limited(dataset, config.limit_batches * config.batch_size, part)


def limited(dataset: SizedDataset, samples: int, part: Literal["train", "test"] = "train") -> SizedDataset:
    """So many samples of a data set, taken evenly from all of it, because files are often sorted by class; 0: all.

    Args:
        dataset: what a task's method returned.
        samples: how many.
        part: which of its methods.

    Raises:
        Refusal: it is not a map-style data set.
    """
    size = length(dataset, f"{part}_dataset")
    if not 0 < samples < size:
        return dataset
    return Limited(dataset, [i * size // samples for i in range(samples)])


class Limited(Dataset[Any]):
    """Some samples of a data set, which makes whole micro-batches of them if it does so of all.

    torch's `Subset` goes sample by sample here (see :class:`Seeded`), and those of a data set that collates for itself
    may not make a batch without it.

    Args:
        dataset: the base.
        indices: the samples' numbers in it.
    """

    def __init__(self, dataset: SizedDataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def __getitems__(self, indices: Indices) -> Any:
        """What the base makes of a micro-batch, or a list of samples."""
        if (fetch_all := whole_fetch(self.dataset)) is None:
            return [self[index] for index in indices]
        return fetch_all(Indices([self.indices[index] for index in indices], indices.epoch, indices.micro_batch))


def whole_fetch(dataset: SizedDataset) -> Callable[[Indices], Any] | None:
    """A data set's own way to fetch a whole micro-batch; None if it goes sample by sample."""
    # these of torch only loop over samples, which then had better be seeded one by one
    if isinstance(dataset, (Subset, StackDataset)) or (
        isinstance(dataset, Limited) and whole_fetch(dataset.dataset) is None
    ):
        return None
    return getattr(dataset, "__getitems__", None)


class Rows:
    """Micro-batches of a data set that is nothing but tensors: one indexing of each, and no random numbers.

    Args:
        tensors: each of shape [N, ...].
        subsets: what was chosen of them, each from what the next one has chosen.
        itself: batches are those of `InMemory`; else those of `default_collate`.
    """

    def __init__(self, tensors: Sequence[Tensor], subsets: Sequence[Sequence[int]], itself: bool) -> None:
        self.tensors, self.subsets, self.itself = tensors, subsets, itself

    @classmethod
    def of(cls, dataset: Any) -> Rows | None:
        """Those of a `TensorDataset`, `InMemory` or parts of one; None for anything that has code of its own."""
        chain = [dataset]
        while type(chain[-1]) in (Subset, Limited):  # not a subclass, which may have a __getitem__ of its own
            chain.append(chain[-1].dataset)
        *parts, base = chain
        if type(base) not in (TensorDataset, InMemory) or not all(map(_is_plain, base.tensors)):
            return None
        itself = type(base) is InMemory and not any(isinstance(part, Subset) for part in parts)
        return cls(base.tensors, [part.indices for part in parts], itself)

    def __call__(self, indices: Indices) -> Any:
        """A collated micro-batch, each tensor of shape [len(indices), ...]."""
        samples: Any = indices.array
        for chosen in self.subsets:
            samples = [index(chosen[number]) for number in samples]
        rows = torch.as_tensor(samples)
        if self.itself:
            return tuple(tensor[rows] for tensor in self.tensors)
        rows = torch.where(rows < 0, rows + len(self.tensors[0]), rows) if self.subsets else rows
        return [tensor.index_select(0, rows) for tensor in self.tensors]  # contiguous, as stacked samples are


def _is_plain(tensor: Any) -> bool:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_nested:
        return False
    return tensor.dim() < 5 or tensor.is_contiguous()  # of others samples are stacked in their own layout


class Seeded(Dataset[Any]):
    """A data set whose random numbers are those of the sample, not of the process that loads it.

    Before each sample the generators are seeded from (seed, purpose, epoch, index). A data set that
    fetches whole micro-batches (``__getitems__``) is seeded once a micro-batch, from where that starts. One that is
    nothing but tensors (`Rows`) draws no random numbers and is not seeded.
    """

    def __init__(self, dataset: SizedDataset, seed: int, purpose: str) -> None:
        self.dataset = dataset
        self.seed = seed
        self.purpose = purpose
        self._rows = Rows.of(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Indices) -> Any:
        """A collated micro-batch."""
        if self._rows:
            return self._rows(indices)
        try:
            with no_exit(EndedByData):  # which a loader process would take for its own end
                return self._fetch(indices)
        except StopIteration as error:  # a loop over batches would take it for its end
            raise exhausted("the data set's __getitem__", error) from error

    def _fetch(self, indices: Indices) -> Any:
        if (fetch_all := whole_fetch(self.dataset)) is not None:
            self._seed(indices.epoch, indices.micro_batch.start)
            return _collate(fetch_all(indices))
        return _collate([self._sample(indices.epoch, index) for index in indices])

    def _sample(self, epoch: int, index: int) -> Any:
        self._seed(epoch, index)
        return self.dataset[index]

    def _seed(self, epoch: int, index: int) -> None:
        seed_host(derive(self.seed, self.purpose, epoch, index))


def loader(
    dataset: SizedDataset, sampler: ElasticSampler, purpose: str, num_workers: int, device: torch.device
) -> DataLoader[Any]:
    """A `DataLoader` of this rank's micro-batches, in order, the same for any number of workers.

    Args:
        dataset: map-style.
        sampler: this rank's share.
        purpose: "train" or "test"; keeps their random numbers apart.
        num_workers: loading processes; they live as long as the loader, and go on with the next epoch of a training.
        device: where batches will go; a GPU gets them from pinned memory.
    """
    return _Loader(
        Seeded(dataset, sampler.seed, purpose),
        batch_sampler=_Onward(sampler) if purpose == "train" and num_workers else sampler,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        persistent_workers=num_workers > 0,
        worker_init_fn=_live_and_die_with_the_parent,
    )


def in_order(dataset: Dataset[Any], numbers: Sequence[int], in_worker: bool) -> list[Any]:
    """What a data set has by these numbers, read here or by a loader process of its own."""
    return list(
        _Loader(
            dataset,
            batch_size=None,
            sampler=numbers,
            num_workers=int(in_worker),
            collate_fn=_as_it_is,
            worker_init_fn=_live_and_die_with_the_parent,
        )
    )


def by_step(batches: DataLoader[Any], sampler: ElasticSampler) -> Iterator[tuple[int, list[MicroBatch], Iterator[Any]]]:
    """Group a loader's micro-batches by step, from where the sampler stands to the end of the epoch.

    Yields:
        (global step, this rank's micro-batches of it, their batches in the same order, loaded on demand).
        An idle rank gets the step with no micro-batches, because it takes part in the reduction.
    """
    stream = iter(batches)
    for step in sampler.steps():
        mine = sampler.micro_batches(step)
        yield step, mine, (next(stream) for _ in mine)
    next(stream, None)  # or it would not know that this was the last one


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device: nested mappings, lists, tuples, dataclasses and what has a `to`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(move := getattr(batch, "to", None)):  # a PackedSequence, say, which knows what must stay on the host
        kind: Any = type(batch)
        return move(device, non_blocking=True) if _may_not_block(kind) else move(device)
    return with_parts(batch, lambda part: to_device(part, device))


@cache
def _may_not_block(kind: Any) -> bool:
    """Whether a kind of batch takes `non_blocking` in its `to`, as torch's do."""
    try:
        taken = inspect.signature(kind.to).parameters.values()
    except (AttributeError, TypeError, ValueError):
        return False
    return any(parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in taken)


def with_parts(batch: Any, function: Callable[[Any], Any]) -> Any:
    """A batch of the same kind with the function's results in place of its parts; what has no parts is itself."""
    if isinstance(batch, Mapping):
        parts = {key: function(value) for key, value in batch.items()}
        if isinstance(batch, MutableMapping):
            copied = copy.copy(batch)  # as torch does it: a kind of mapping may have more to it than its items
            copied.update(parts)
            return copied
        return type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(function, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(function, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(changed, field.name, function(getattr(batch, field.name)))  # it may be frozen
        return changed
    return batch


def tensors_in(batch: Any) -> list[Tensor]:
    """All tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        return [batch]
    found: list[Tensor] = []
    with_parts(batch, lambda part: found.extend(tensors_in(part)))
    return found


def samples_in(batch: Any) -> int:
    """The samples of a batch: the first dimension of its first tensor that has any.

    Raises:
        Ended: it has no such tensor.
    """
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    raise Ended(f"--strategy dp: cannot divide {type(batch).__name__}, a batch without tensors, among GPUs; use ddp")


def divide(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """A batch cut into consecutive parts of so many samples each.

    `nn.DataParallel` knows how to divide tensors in dicts, lists and tuples only, and would give each GPU a whole list
    of texts, or a whole mapping of another kind.
    """
    ends = list(accumulate(sizes))
    return [_part(batch, slice(end - size, end), ends[-1]) for size, end in zip(sizes, ends, strict=True)]


def _part(batch: Any, where: slice, samples: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[where] if batch.dim() and len(batch) == samples else batch
    if isinstance(batch, (list, tuple)) and len(batch) == samples and not tensors_in(batch):
        return batch[where]  # texts, say, one for each sample
    return with_parts(batch, lambda part: _part(part, where, samples))


def _collate(samples: Any) -> Any:
    """Collate a list of samples; what a data set has collated itself passes through."""
    if not isinstance(samples, list):
        return samples
    try:
        return default_collate(samples)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise Uncollated(explain_samples(samples, error)) from error


def _as_it_is(batch: Any) -> Any:
    return batch  # `Seeded` has collated it


class _Onward:
    """The micro-batches from where a sampler stands to the end of its epoch, then those of the epochs that follow.

    Loader processes stop at the end of their batch sampler, and would load the first batch of an epoch while the GPU
    waits for it.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Indices]:
        ahead = copy.copy(self.sampler)
        while True:
            yield from ahead
            ahead.set_epoch(ahead.epoch + 1)
            if not any(map(ahead.micro_batches, ahead.steps())):  # this rank idles
                return

    def __len__(self) -> int:
        return len(self.sampler)


class _Loader(DataLoader[Any]):
    """A `DataLoader` whose workers end when this process exits, although they ignore SIGTERM.

    With `_Onward` they are not stopped between two epochs that are next to each other.
    """

    _onward: Iterator[Any] | None = None
    """What comes after the epoch that was the last one, if it was taken to its end."""
    _stands_at = (-1, -1)
    """Its epoch, and the step within that."""

    def __iter__(self) -> Any:
        if not isinstance(self.batch_sampler, _Onward):
            return self._begin()
        sampler = self.batch_sampler.sampler
        stream, self._onward = self._onward, None
        if stream is None or self._stands_at != (sampler.epoch, sampler.first_step):
            stream = self._begin()
        return self._one_epoch(stream, sampler)

    def _one_epoch(self, stream: Iterator[Any], sampler: ElasticSampler) -> Iterator[Any]:
        for step in sampler.steps():
            for _ in sampler.micro_batches(step):
                yield next(stream)
        self._onward, self._stands_at = stream, (sampler.epoch + 1, 0)

    def _begin(self) -> Any:
        if self.num_workers and self._iterator is None:
            _make_room_for_sockets()
            # gloo's threads enter Python once more after a reduction, to let go of its callback; a fork at that very
            # moment leaves the child waiting for a lock of the interpreter (seen once, in 3.11's PyOS_AfterFork_Child)
            time.sleep(0.1 * is_initialized())
        others = multiprocessing.active_children()
        stream = super().__iter__()
        if workers := [child for child in multiprocessing.active_children() if child not in others]:
            atexit.register(_kill, workers)
        return stream


def _make_room_for_sockets() -> None:
    """Make the folder of `multiprocessing` in this process, which also removes it, because its workers are killed.

    In /tmp where the temporary folder's path is so long that a socket in it has no name: a worker's thread would lose
    the batch with that error, and the training wait for it. Python 3.14 does so by itself.
    """
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > LONGEST_SOCKET - len("/pymp-12345678/listener-12345678"):
        tempfile.tempdir = "/tmp"  # noqa: S108
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = usual


def _kill(workers: Iterable[BaseProcess]) -> None:
    """End the workers that are left at exit, where Python would send them SIGTERM and wait for them.

    Usually there are none; but after an exception its traceback holds the loop's frame, and that the loader.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report each as a failure
    for worker in workers:
        worker.kill()


def _live_and_die_with_the_parent(_worker: int) -> None:
    """Let a loader process end with the training process it works for, and neither before nor after.

    Slurm signals every process of a step, and Ctrl-C every process of a terminal; a loader that died first would take
    the step in progress with it. They are ignored rather than blocked, because a mask binds only one thread, and a
    process that was not forked has more by now.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)

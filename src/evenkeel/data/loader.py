"""Loading micro-batches, in this process or in workers, with each sample's own random numbers."""

from __future__ import annotations

import copy
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ..common.errors import EndedByData, Uncollated, no_exit, place_of, seen_at
from ..common.naming import TRAIN
from ..common.processes import kill_at_exit, outlive_signals, shorten_temp_dir
from .batch import collate, collated_by
from .dataset import Collated, Rows, SizedDataset, inner_index, reader_of, sample_of, tell_epoch, whole_fetch
from .order import Ordered
from .randomness import derive, seed_host
from .sampler import ElasticSampler, Indices


class Seeded(Dataset[Any]):
    """A data set whose random numbers depend on the sample, not on the process that loads it.

    The generators are seeded from (seed, purpose, epoch, number) before each read. The number is

    - the index of the sample;
    - if the task has its own order, in which a sample may come several times: its position;
    - of a data set that fetches whole micro-batches (``__getitems__``), and of a task's own collate (`Collated`): the
      first position.

    A data set of tensors only (`Rows`) draws no random numbers and is not seeded. ``set_epoch`` of a data set is called
    before its samples are read, in the process that reads them.
    """

    def __init__(self, dataset: SizedDataset, seed: int, purpose: str) -> None:
        self.seed, self.purpose = seed, purpose
        self._by_position = isinstance(dataset, Ordered)
        dataset = dataset.dataset if isinstance(dataset, Ordered) else dataset
        self.rows = Rows.of(dataset)
        """Fetches rows of tensors; None for other data sets."""
        self._collate = dataset.collate if isinstance(dataset, Collated) else None
        self.dataset: SizedDataset = dataset.dataset if isinstance(dataset, Collated) else dataset
        self.fetch_all = None if self.rows else whole_fetch(self.dataset, samples=self._collate is not None)
        """Fetches a whole micro-batch; None: samples are fetched one by one, or rows of tensors."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Indices) -> Any:
        """Return a collated micro-batch."""
        if self.rows:
            return self.rows(indices)
        try:
            with no_exit(EndedByData):  # a SystemExit would only end the loader process
                tell_epoch(self.dataset, indices.epoch)
                if self.fetch_all:
                    seed_host(derive(self.seed, self.purpose, indices.epoch, indices.micro_batch.start))
                    fetched = self.fetch_all(indices)
                else:
                    first = indices.micro_batch.start
                    places = range(first, first + len(indices)) if self._by_position else indices
                    fetched = [self._sample(indices.epoch, *it) for it in zip(indices, places, strict=True)]
                return self.collated(fetched, indices.epoch, indices.micro_batch.start)
        except Uncollated as error:
            numbers = [inner_index(self.dataset, index) for index in indices]
            text = re.sub(r"\bat entry (\d+)", lambda it: f"in sample {numbers[int(it[1])]}", str(error))
            raise Uncollated(text) from error.__cause__
        except (StopIteration, GeneratorExit) as error:  # would end the loop over batches, or the loader process
            raise EndedByData(
                f"the data set's __getitem__ raised {type(error).__name__}{place_of(error.__traceback__)}: an iterator "
                "there is exhausted; give next() a second argument, or fetch samples by index"
            ) from error

    def collated(self, samples: Any, epoch: int = 0, start: int = 0) -> Any:
        """Collate a list of samples that begins at this position of an epoch; return a batch unchanged."""
        if self._collate is None or not isinstance(samples, list):
            with seen_at(reader_of(self.dataset)):
                return collate(samples)
        seed_host(derive(self.seed, f"{self.purpose} collate", epoch, start))
        return collated_by(self._collate, samples)

    def _sample(self, epoch: int, index: int, place: int) -> Any:
        seed_host(derive(self.seed, self.purpose, epoch, place))
        sample = sample_of(self.dataset, index)
        if sample is None and self._collate is None:
            with seen_at(reader_of(self.dataset)):
                raise Uncollated(f"sample {inner_index(self.dataset, index)} is None: does __getitem__ return it?")
        return sample


def make_loader(
    dataset: SizedDataset,
    sampler: ElasticSampler,
    purpose: str,
    num_workers: int,
    device: torch.device,
    ahead: bool = True,
) -> Loader:
    """Return a `DataLoader` of this rank's micro-batches, in order, the same for any number of workers.

    Args:
        dataset: map-style.
        sampler: this rank's share.
        purpose: "train", or the name of a set of the evaluation; each has its own random numbers.
        num_workers: loader processes, used for all epochs. In training they begin the next epoch ahead of time.
        device: the batches' destination; batches for a GPU are in pinned memory.
        ahead: False: fork new loader processes at the beginning of each epoch.
    """
    batches = _AllEpochs(sampler) if purpose == TRAIN and num_workers and ahead else sampler
    return _new_loader(Seeded(dataset, sampler.seed, purpose), batches, num_workers, device, persistent=ahead)


def start_workers(dataset: SizedDataset, seed: int, num_workers: int, device: torch.device) -> Loader | None:
    """Start the loader processes of the training data, which wait for `Loader.set_sampler`; None for no processes.

    Call this before the state is loaded: otherwise the first step would copy every page of it that is shared with a
    loader process, and that process would keep the old pages for as long as it lives.
    """
    if not num_workers:
        return None
    made = _new_loader(Seeded(dataset, seed, TRAIN), _AllEpochs(None), num_workers, device)
    made.new_iterator()
    return made


def _new_loader(
    dataset: Seeded, sampler: Iterable[Indices], num_workers: int, device: torch.device, persistent: bool = True
) -> Loader:
    pin, keep = device.type == "cuda", persistent and num_workers > 0
    return Loader(dataset, num_workers, batch_sampler=sampler, pin_memory=pin, persistent_workers=keep)


def _unchanged(batch: Any) -> Any:
    """The batch itself: `Seeded` has collated it."""
    return batch


class _AllEpochs:
    """The micro-batches from a sampler's position to the end of its epoch, then those of the later epochs.

    Loader processes stop at the end of their batch sampler, and the GPU would wait for the first batch of each epoch.
    """

    def __init__(self, sampler: ElasticSampler | None) -> None:
        self.sampler = sampler
        """None: not known yet (:func:`start_workers`), and there are no micro-batches."""

    def __iter__(self) -> Iterator[Indices]:
        if self.sampler is None:
            return
        ahead = copy.copy(self.sampler)
        while True:
            yield from ahead
            ahead.set_epoch(ahead.epoch + 1)
            if ahead.epoch == ahead.epochs or not ahead.micro_batches(ahead.steps().start):  # it idles
                return

    def __len__(self) -> int:
        return len(self.sampler or ())


class Loader(DataLoader[Any]):
    """A `DataLoader` whose workers end with this process, although they ignore SIGTERM.

    With `_AllEpochs` the workers go on from one epoch to the next: when an epoch was read to its end, the loader keeps
    their iterator for the next epoch. If that begins elsewhere (other shares), the workers begin a new one, and what
    they have loaded ahead is dropped.

    On Linux they are forks of this process on every version of Python. From 3.14 on the default is a server that forks
    them: a data set would have to be pickled, each start would import torch, and the signals that Slurm sends to all
    processes would end the server. `multiprocessing.set_start_method("spawn")` still selects another method.
    """

    _next_epoch: Iterator[Any] | None = None
    """Batches of the next epoch, if the last one was read to the end."""
    _next_epoch_at: tuple[Any, ...] = ()
    """Where they begin: epoch, step in it, and the ranks' shares."""

    def __init__(self, dataset: Dataset[Any], num_workers: int, **options: Any) -> None:
        chosen = multiprocessing.get_start_method(allow_none=True)
        if num_workers and sys.platform == "linux" and chosen in (None, multiprocessing.get_all_start_methods()[0]):
            options["multiprocessing_context"] = "fork"
        options |= {"collate_fn": _unchanged, "worker_init_fn": outlive_signals}
        super().__init__(dataset, num_workers=num_workers, **options)

    def check_worker_number_rationality(self) -> None:
        """Say nothing, where torch warns on each rank for each set; `warnings_at_start` does."""

    def set_sampler(self, sampler: ElasticSampler) -> Loader:
        """Load this sampler's micro-batches from here on, in the processes that :func:`start_workers` has started."""
        assert isinstance(self.batch_sampler, _AllEpochs)
        self.batch_sampler.sampler = sampler
        return self

    def __iter__(self) -> Any:
        if not isinstance(self.batch_sampler, _AllEpochs):
            return self.new_iterator()
        sampler = self.batch_sampler.sampler
        assert sampler is not None
        batches, self._next_epoch = self._next_epoch, None
        if batches is None or self._next_epoch_at != (sampler.epoch, sampler.first_step, sampler.per_rank):
            batches = self.new_iterator()
        return self._one_epoch(batches, sampler)

    def _one_epoch(self, batches: Iterator[Any], sampler: ElasticSampler) -> Iterator[Any]:
        for step in sampler.steps():
            for _ in sampler.micro_batches(step):
                yield next(batches)
        # reached because `by_step` asks once more than there are micro-batches
        self._next_epoch, self._next_epoch_at = batches, (sampler.epoch + 1, 0, sampler.per_rank)

    def new_iterator(self) -> Any:
        """Iterate over the micro-batches from the sampler's position on; start the loader processes if none run."""
        if self.num_workers and self._iterator is None:
            shorten_temp_dir()
            if dist.is_initialized():
                # gloo's threads enter Python once more after a collective, to release its callback. A worker forked at
                # that moment waits forever for a lock of the interpreter (seen once, in 3.11's PyOS_AfterFork_Child)
                time.sleep(0.1)
        others = multiprocessing.active_children()
        iterator = super().__iter__()
        kill_at_exit([child for child in multiprocessing.active_children() if child not in others])
        return iterator

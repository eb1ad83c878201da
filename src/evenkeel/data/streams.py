"""Streams as numbered samples: data that can only be read in order is used *exactly once* too.

A stream has K substreams; K belongs to the job, not to its ranks and loader processes. With a global batch of G, the
samples of a run are numbered as follows: c = G / gcd(G, K) of substream 0, c of substream 1, ..., then the next c of
substream 0. So the place in each substream is a function of the step, every rank knows all of them, and no process
needs the state of another. `Numbered` reads a sample by its number: each process keeps the substreams open that it
has read from, and reads on (`substream`).
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from ..common.errors import Refusal
from ..common.naming import kind_of
from ..config import Config
from .blocks import Blocks
from .dataset import Collated
from .plan import ENDLESS, Plan
from .shuffle import Array
from .substream import Reader, Substream

log = logging.getLogger(__name__)

STEPS = 32
"""Maximum number of steps to check for substreams with several readers."""


@dataclass(frozen=True)
class Streams:
    """K substreams of samples, which a task's `train_dataset` may return. Needs --max-steps.

    Args:
        source: (k, turn) -> an iterable of the samples of substream k, the same ones each time. At its end it is
            opened again with turn + 1; turns begin at 0. Must not depend on ranks and loader processes. It resumes
            quickly if it has `seek_sample(n)`, which is called before `iter`, skips n samples or as many as
            there are, and returns the number; or `state_dict()` and `load_state_dict(state)`.
        substreams: K. Best a multiple of the number of ranks that divides the global batch, or a multiple of that.
        state_every: seconds between two records of a source's `state_dict()`.

    Example:
        >>> streams = Streams(lambda k, turn: range(10 * k, 10 * k + 3), substreams=2)
        >>> Numbered(streams, batch=4).__getitems__(range(8))
        [0, 1, 10, 11, 2, 0, 12, 10]
    """

    source: Callable[[int, int], Iterable[Any]]
    substreams: int
    state_every: float = 30.0

    def __post_init__(self) -> None:
        if type(self.substreams) is not int or self.substreams < 1:
            raise Refusal(f"Streams: substreams must be an integer of at least 1, but is {self.substreams!r}")
        try:
            with suppress(ValueError):  # a function of an extension module may have no signature
                inspect.signature(self.source).bind(0, 0)
        except TypeError as error:
            why = f"{kind_of(self.source)}: {error}"
            raise Refusal(f"Streams: source must be a function of (substream, turn), but is {why}") from None

    @staticmethod
    def of(dataset: Any) -> Streams:
        """The streams of an `IterableDataset`: one per shard, if it has `shard()` as Hugging Face's have, else one."""
        shards = getattr(dataset, "num_shards", 0) or getattr(dataset, "n_shards", 0)
        count = shards if callable(getattr(dataset, "shard", None)) and type(shards) is int else 0
        return Streams(partial(_open, dataset, count), max(1, count))


def _open(dataset: Any, count: int, k: int, turn: int) -> Any:
    part = dataset.shard(num_shards=count, index=k) if count else copy.copy(dataset)
    if callable(set_epoch := getattr(part, "set_epoch", None)):
        set_epoch(turn)
    return part


def numbered(dataset: Any, config: Config, unchanged: bool = False) -> Any:
    """Turn a stream into numbered samples; any other data set is returned unchanged.

    Raises:
        Refusal: the options are for data with a known number of samples.
    """
    if not isinstance(dataset, (Streams, IterableDataset)):
        return dataset
    misfits = {
        f"--validation {config.validation:g}": (config.validation, "leave it out and define validation_dataset()"),
        f"--limit-batches {config.limit_batches}": (config.limit_batches, "use a smaller --max-steps instead"),
        "--set train": (unchanged, "name a set of the evaluation, or use --input"),
        "--max-steps is missing": (not config.max_steps and not config.eval_only, "set the number of steps to train"),
    }
    for option, (misfit, remedy) in misfits.items():
        if misfit:
            raise Refusal(
                f"{option}: train_dataset() returned {kind_of(dataset)}, a stream, which has no epochs here; {remedy}"
            )
    streams = dataset if isinstance(dataset, Streams) else Streams.of(dataset)
    return Numbered(streams, config.batch_size, config.seed, config.run_dir and config.run_dir / "streams")


def stream_of(dataset: Any) -> Numbered | None:
    """The training data if it is a stream, else None."""
    inner = dataset.dataset if isinstance(dataset, Collated) else dataset
    return inner if isinstance(inner, Numbered) else None


class _InOrder(Blocks):
    """The order of a stream: positions are samples."""

    name = ""

    def shuffled(self, positions: Array, seed: int, epoch: int) -> Array:
        return positions


class Numbered(Dataset[Any]):
    """The samples of `Streams` by number, in the order of training.

    Args:
        streams: the substreams.
        batch: G, the samples of a step.
        seed: before each sample the generators are seeded from (seed, substream, its place there).
        folder: for the states of sources; None: they are not stored.
    """

    def __init__(self, streams: Streams, batch: int, seed: int = 0, folder: Path | None = None) -> None:
        self.streams, self.batch, self.seed, self.folder = streams, batch, seed, folder
        self.stretch = batch // math.gcd(batch, streams.substreams)
        """c, the samples taken from a substream at a time."""
        self._readers: dict[int, Reader] = {}
        self._process = os.getpid()
        self._told = set[str]()
        self._looks = 0

    def __len__(self) -> int:
        return ENDLESS - ENDLESS % self.batch

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return these samples; fast if they are the next ones of their substreams in this process."""
        if self._process != os.getpid():  # files opened before a fork share their offset with the parent
            self._readers, self._process = {}, os.getpid()
        places = [*map(self.place, numbers)]
        self._readers.update({k: Reader(self._substream(k)) for k in {k for k, _ in places} - self._readers.keys()})
        return [self._readers[k].take(place) for k, place in places]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}

    @property
    def name(self) -> str:
        """The record of this order in a run; another name means another order."""
        return f"{self.streams.substreams} substreams, {self.stretch} samples at a time"

    def order_blocks(self) -> Blocks:
        """The order of the stream itself."""
        order = _InOrder([len(self)], window=1)
        order.name = self.name
        return order

    def place(self, number: int) -> tuple[int, int]:
        """(substream, place in it) of a sample."""
        stretch, inside = divmod(number, self.stretch)
        times, k = divmod(stretch, self.streams.substreams)
        return k, times * self.stretch + inside

    def first_samples(self) -> list[Any]:
        """The first two samples of up to four substreams, opened anew; each start compares them.

        Every second call reads the second sample as a resume would, which must find the same one.
        """
        self._looks += 1
        samples = []
        for k in range(min(4, self.streams.substreams)):
            reader = Reader(self._substream(k))
            samples.append(reader.take(0))
            samples.append((Reader(self._substream(k)) if self._looks % 2 == 0 else reader).take(1))
        return samples

    def _substream(self, k: int) -> Substream:
        states = self.folder / f"{k}.json" if self.folder else None
        of, name = self.streams, f"{self.name}, seed {self.seed}"
        return Substream(k, of.source, self.seed, self.stretch, of.state_every, states, name, self._tell_once)

    def _tell_once(self, what: str, line: str) -> None:
        """Log a line, unless this process has logged this kind for any substream."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", line)

    def shared(self, plan: Plan, world_size: int, workers: int, per_rank: tuple[int, ...] = ()) -> str:
        """A message if several processes read the same substream, with the remedy; else empty. `per_rank`: see
        `Plan.shares`."""
        most = self._most_readers(plan, world_size, workers, per_rank)
        if most == 1:
            return ""
        fitting = [n for n in range(1, workers) if self._most_readers(plan, world_size, n) == 1]
        remedy = (
            f"the number of substreams ({self.streams.substreams}) and --batch-size ({self.batch}) should be multiples "
            f"of the number of ranks ({world_size}), and `Streams` gives a stream any number of substreams"
        )
        if self._most_readers(plan, world_size, workers) == 1:
            remedy = "with --shares equal only one does"
        elif fitting:
            remedy = f"with --num-workers {max(fitting)} only one does"
        return f"up to {most} processes read the same substreams, each of them all of it; {remedy}"

    def _most_readers(self, plan: Plan, world_size: int, workers: int, per_rank: tuple[int, ...] = ()) -> int:
        """The maximum number of processes that read one substream; a `DataLoader`'s workers take turns."""
        readers = defaultdict[int, set[tuple[int, int]]](set)
        for rank in range(world_size):
            steps = range(min(plan.total_steps, STEPS))
            mine = (micro for step in steps for micro in plan.micro_batches(step, rank, world_size, per_rank))
            for number, micro in enumerate(mine):
                stretches = range(micro.start // self.stretch, (micro.start + micro.size - 1) // self.stretch + 1)
                for stretch in stretches:
                    readers[stretch % self.streams.substreams].add((rank, number % max(1, workers)))
        return max(map(len, readers.values()))

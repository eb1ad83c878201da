"""Streams as numbered samples: data that can only be read in order takes part in *exactly once*.

A stream is K substreams, a fact of the job and not of its ranks and loader processes. With a global batch of G, the
samples of a run are numbered so: c = G / gcd(G, K) of substream 0, c of substream 1, ..., then the next c of substream
0. So the place in each substream is a function of the step, every rank knows all of them, and no state of another
process is ever needed. `Numbered` reads a sample by its number: each process keeps the substreams open that it has
been asked for, and reads on.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from ..common.errors import Ended, EndedByData, Refusal, place_of
from ..common.files import read_json
from ..common.memory import is_out_of_memory
from ..common.naming import kind_of
from ..common.phases import activity
from ..config import Config
from .blocks import Blocks
from .data_digest import digest
from .plan import Plan
from .randomness import derive, seed_host
from .shuffle import Array

log = logging.getLogger(__name__)

LENGTH = 2**60
"""About as many samples has a stream by its `len`: more than any run reads."""
TOLD = 10.0
"""Seconds between two lines about reading forward."""
STEPS = 32
"""Steps that are looked at for substreams with several readers, at most."""
FEW = 64
"""Stretches that may be read forward without a line about it."""
CHECKED = 16
"""Samples by which a source's state is checked when it is loaded."""
LARGEST = 2**20
"""Characters of a state that is kept, at most: its file is written anew each time."""
END = object()


@dataclass(frozen=True)
class Streams:
    """K substreams of samples, which a task's `train_dataset` may return. Needs --max-steps.

    Args:
        source: (k, turn) -> an iterable of the samples of substream k, the same ones each time. When it is at its end,
            it is opened again with turn + 1; turns begin at 0. Must not ask for ranks and loader processes. It is
            quick to resume if it has `seek_sample(n)`, which is called before `iter`, skips n samples or as many as
            there are, and returns how many; or `state_dict()` and `load_state_dict(state)`.
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
            raise Refusal(f"Streams: substreams must be a whole number from 1 on, and is {self.substreams!r}")
        if not callable(self.source):
            raise Refusal(f"Streams: source must be a function of (substream, turn), and is {kind_of(self.source)}")

    @staticmethod
    def of(dataset: Any) -> Streams:
        """The streams of an `IterableDataset`: as many as it has shards, if it has `shard` as Hugging Face's, or 1."""
        shards = getattr(dataset, "num_shards", 0) or getattr(dataset, "n_shards", 0)
        count = shards if callable(getattr(dataset, "shard", None)) and type(shards) is int else 0
        return Streams(partial(_open, dataset, count), max(1, count))


def _open(dataset: Any, count: int, k: int, turn: int) -> Any:
    part = dataset.shard(num_shards=count, index=k) if count else copy.copy(dataset)
    if callable(set_epoch := getattr(part, "set_epoch", None)):
        set_epoch(turn)
    return part


def numbered(dataset: Any, config: Config, unchanged: bool = False) -> Any:
    """Make numbered samples of a stream; any other data set is returned as it is.

    Raises:
        Refusal: the options are for data with a known number of samples.
    """
    if not isinstance(dataset, (Streams, IterableDataset)):
        return dataset
    misfits = {
        f"--validation {config.validation:g}": (config.validation, "leave it out and define validation_dataset()"),
        f"--limit-batches {config.limit_batches}": (config.limit_batches, "give fewer --max-steps instead"),
        "--set train": (unchanged, "name a set of the evaluation, or use --input"),
        "--max-steps is missing": (not config.max_steps and not config.eval_only, "say how many steps to train"),
    }
    for option, (misfit, remedy) in misfits.items():
        if misfit:
            raise Refusal(f"{option}: train_dataset() returned {kind_of(dataset)}, a stream without an end; {remedy}")
    streams = dataset if isinstance(dataset, Streams) else Streams.of(dataset)
    return Numbered(streams, config.batch_size, config.seed, config.run_dir and config.run_dir / "streams")


class _InOrder(Blocks):
    """The order of a stream: its own."""

    name = ""

    def shuffled(self, positions: Array, seed: int, epoch: int) -> Array:
        return positions


class Numbered(Dataset[Any]):
    """The samples of `Streams` by number, in the order in which they are trained on.

    Args:
        streams: the substreams.
        batch: G, the samples of a step.
        seed: before each sample the generators are seeded from (seed, substream, its place there).
        folder: for the states of sources; None: they are not kept.
    """

    def __init__(self, streams: Streams, batch: int, seed: int = 0, folder: Path | None = None) -> None:
        self.streams, self.batch, self.seed, self.folder = streams, batch, seed, folder
        self.stretch = batch // math.gcd(batch, streams.substreams)
        """c, the samples that are taken of a substream at a time."""
        self._readers: dict[int, _Reader] = {}
        self._process = os.getpid()
        self._told = set[str]()
        self._looks = 0

    def __len__(self) -> int:
        return LENGTH - LENGTH % self.batch

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return these samples; quick if they are the next ones of their substreams in this process."""
        if self._process != os.getpid():  # files opened before a fork share their place with the parent
            self._readers, self._process = {}, os.getpid()
        places = [*map(self.place, numbers)]
        self._readers.update({k: _Reader(self, k) for k in {k for k, _ in places} - self._readers.keys()})
        return [self._readers[k].take(place) for k, place in places]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": {}}

    @property
    def name(self) -> str:
        """What a run records of its order; another name is another order."""
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
        """The first two samples of up to four substreams, opened anew: what each start compares.

        Every second time the second sample is read as by a resume, which must find the same one.
        """
        self._looks += 1
        samples = []
        for k in range(min(4, self.streams.substreams)):
            reader = _Reader(self, k)
            samples.append(reader.take(0))
            samples.append((_Reader(self, k) if self._looks % 2 == 0 else reader).take(1))
        return samples

    def tell_once(self, what: str, line: str) -> None:
        """Log a line, unless this process has told this of any substream."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", line)

    def shared(self, plan: Plan, world_size: int, workers: int) -> str:
        """Say how many processes read each substream, if one does not suffice, and what to do; else empty."""
        most = self._most_readers(plan, world_size, workers)
        if most == 1:
            return ""
        fitting = [n for n in range(1, workers) if self._most_readers(plan, world_size, n) == 1]
        remedy = "make --batch-size and the number of substreams multiples of the number of ranks"
        if fitting:
            remedy = f"with --num-workers {max(fitting)} one does"
        return f"up to {most} processes read the same substreams, each of them all of it; {remedy}"

    def _most_readers(self, plan: Plan, world_size: int, workers: int) -> int:
        """The most processes that read one substream; a `DataLoader` gives its workers micro-batches by turns."""
        readers = defaultdict[int, set[tuple[int, int]]](set)
        for rank in range(world_size):
            steps = range(min(plan.total_steps, STEPS))
            mine = (micro for step in steps for micro in plan.micro_batches(step, rank, world_size))
            for number, micro in enumerate(mine):
                stretches = range(micro.start // self.stretch, (micro.start + micro.size - 1) // self.stretch + 1)
                for stretch in stretches:
                    readers[stretch % self.streams.substreams].add((rank, number % max(1, workers)))
        return max(map(len, readers.values()))


class _Reader:
    """A substream that is open in this process. `at` is the place of the sample that comes next."""

    def __init__(self, of: Numbered, k: int) -> None:
        self.of, self.k, self.at, self.turn, self.begin = of, k, 0, -1, 0
        self._source: Any = None
        self._iterator: Iterator[Any] | None = None
        self._states = _States(of, k)
        self._due = time.monotonic() + of.streams.state_every
        self._noted: dict[str, Any] = {}
        self._marks: list[str] = []

    def take(self, place: int) -> Any:
        """Return the sample at a place.

        Raises:
            EndedByData: it cannot be read, or a turn of the substream is empty.
        """
        try:
            if self._source is None or place != self.at:
                self._move(place)
            return self._next()
        except Exception as error:
            self._source = None  # its iterator is at an end that is none
            if isinstance(error, Ended) or is_out_of_memory(error):
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise EndedByData(
                f"substream {self.k} of the training data: its sample {self.at} cannot be read: {why}"
                f"{place_of(error.__traceback__)}"
            ) from error

    def _move(self, place: int) -> None:
        anew = self._source is None or place < self.at
        if anew:
            self._noted = {}
            self.at = self.begin = 0
            self._enter(0)
        if hasattr(self._source, "seek_sample"):
            while self.at < place:
                self._seek(place)
            return
        restored = anew and self._is_stateful() and self._restore(place)
        if anew and not restored and place > FEW * self.of.stretch:
            self.of.tell_once(
                "forward",
                f"substream {self.k} is read forward over {place:,} samples to where the run goes on, and so "
                "are others; a source that has seek_sample(n), or state_dict() and load_state_dict(), need not",
            )
        self._read_forward(place)

    def _read_forward(self, place: int) -> None:
        told = time.monotonic()
        while self.at < place:
            self._next()
            if time.monotonic() - told > TOLD:
                told = time.monotonic()
                log.warning("substream %d: at %s of %s samples", self.k, f"{self.at:,}", f"{place:,}")
                activity.enter(activity.phase, "reading a stream forward")  # no hang, where this process trains

    def _enter(self, turn: int) -> None:
        """Open the source for a turn; `begin` is to be where that begins."""
        # a source that deals itself out by loader processes, as Hugging Face's, would leave samples out
        torch.utils.data._utils.worker._worker_info = None
        seed_host(derive(self.of.seed, "turn of a stream", self.k, turn))
        self.turn, self._source, self._iterator = turn, self.of.streams.source(self.k, turn), None

    def _next(self) -> Any:
        while True:
            self._note()
            seed_host(derive(self.of.seed, "stream", self.k, self.at))
            if self._iterator is None:
                self._iterator = iter(self._source)
            sample = next(self._iterator, END)
            if sample is not END:
                self.at += 1
                if self._noted:
                    self._marks.append(_mark(sample))
                return sample
            self._next_turn()

    def _next_turn(self) -> None:
        if self.at == self.begin:
            raise EndedByData(f"substream {self.k} of the training data has no samples in its turn {self.turn}")
        self.begin = self.at
        self._enter(self.turn + 1)

    def _seek(self, place: int) -> None:
        """Go to a place by the source's own `seek_sample`, or to the end of this turn if that comes before."""
        if self._iterator is not None:
            self._enter(self.turn)
        wanted = place - self.begin
        reached = index(self._source.seek_sample(wanted))
        if not 0 <= reached <= wanted:
            raise EndedByData(
                f"substream {self.k} of the training data: seek_sample({wanted}) returned {reached}; return how many "
                "samples it has skipped, fewer only at the end"
            )
        self.at = self.begin + reached
        if reached < wanted:
            self._next_turn()

    def _is_stateful(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def _note(self) -> None:
        """Keep the source's own state from time to time, once the samples that follow it are known."""
        if self._noted and len(self._marks) == CHECKED:
            self._states.keep(self._noted | {"next": self._marks})
            self._noted = {}
        if self._noted or not self._iterator or not self.of.folder or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.of.streams.state_every
        if self._is_stateful() and not hasattr(self._source, "seek_sample"):
            try:
                state = _as_json(self._source.state_dict())
            except Exception as error:
                self._due = math.inf
                why = f"{type(error).__name__}: {error}"
                self.of.tell_once("json", f"substream {self.k}: its state is not kept, a resume reads forward: {why}")
                return
            self._noted = {"place": self.at, "turn": self.turn, "begin": self.begin, "state": state}
            self._marks = []

    def _restore(self, place: int) -> bool:
        """Go on from the newest state before a place, if the samples that follow are those that followed then."""
        for entry in self._states.before(place - CHECKED):
            with suppress(Exception):  # whatever a spoilt state does
                self._enter(entry["turn"])
                self._source.load_state_dict(entry["state"])
                self.at, self.begin = entry["place"], entry["begin"]
                if [_mark(self._next()) for _ in range(CHECKED)] == entry["next"]:
                    return True
            self.of.tell_once(
                "state",
                f"substream {self.k}: the source does not go on from its state as it did, so it is read forward; a "
                "buffer that shuffles is often not part of the state",
            )
            self.at = self.begin = 0
            self._enter(0)
        return False


def _mark(sample: Any) -> str:
    """Tells a sample from others."""
    return hashlib.sha256(json.dumps(digest(sample, whole=True)).encode()).hexdigest()[:8]


def _as_json(state: Any) -> Any:
    """A copy of a source's state, as it comes back from a file.

    Raises:
        ValueError: it is too large, or does not come back as it was; also what `json` raises.
    """
    text = json.dumps(state)
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text):,} characters, of which at most {LARGEST:,} are kept")
    if (copied := json.loads(text)) != state:
        raise ValueError("it does not come back from JSON as it was")
    return copied


class _States:
    """The states of a substream's source at some places, in a file of the run: they save time, nothing else.

    Older ones are thinned out, so that for any place there is one at most about twice as old as needed.
    """

    def __init__(self, of: Numbered, k: int) -> None:
        self.of, self.k = of, k
        self.path = of.folder / f"{k}.json" if of.folder else None
        self._name = f"{of.name}, seed {of.seed}"

    def before(self, place: int) -> list[dict[str, Any]]:
        """Those at or before a place, the newest first."""
        return [entry for entry in self._read()[::-1] if entry["place"] <= place]

    def keep(self, entry: dict[str, Any]) -> None:
        """Keep the state that a source had at a place."""
        kept = self._read()
        if kept and kept[-1]["place"] >= entry["place"]:
            return  # another process reads the same, or the run has been further
        newest = kept[-1]["number"] + 1 if kept else 1
        kept = [*kept, {"number": newest, **entry}]
        kept = [it for it in kept if it["number"] > newest - 2 * (it["number"] & -it["number"])]
        assert self.path
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with suppress(OSError):  # a full disk is told of by what must be written
            self.path.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps({"of": self._name, "kept": kept}))
            temporary.replace(self.path)  # not synced, as there may be thousands of them: see `_read`

    def _read(self) -> list[dict[str, Any]]:
        """The states of this very stream, by place; a file that is spoilt or of another one counts as none."""
        try:
            found = read_json(self.path) if self.path else {}
            kept = sorted(found["kept"], key=lambda entry: int(entry["place"])) if found else []
            whole = all(type(it[name]) is int for it in kept for name in ("number", "place", "turn", "begin"))
            if not found or (whole and found["of"] == self._name):
                return kept
            why = "of another stream"
        except (OSError, ValueError, TypeError, LookupError) as error:
            why = f"{type(error).__name__}: {error}"
        self.of.tell_once("spoilt", f"{self.path}: not used: {why}")
        return []

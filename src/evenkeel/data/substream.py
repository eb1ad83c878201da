"""A substream that is read in order: moved to a place, read on, and its source's own state stored from time to time."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch

from ..common.errors import Ended, EndedByData, place_of
from ..common.files import read_json, temporary_name
from ..common.memory import is_out_of_memory
from ..common.phases import activity
from .data_digest import digest
from .randomness import derive, seed_host

log = logging.getLogger(__name__)

TOLD = 10.0
"""Seconds between two lines about reading forward."""
FEW = 64
"""Stretches that may be read forward without a message."""
CHECKED = 16
"""Samples that check a source's state after it is loaded."""
LARGEST = 2**20
"""Maximum number of characters of a stored state: its file is rewritten each time."""
END = object()


@dataclass(frozen=True)
class Substream:
    """One of the substreams of a job."""

    k: int
    """Its number."""
    source: Callable[[int, int], Iterable[Any]]
    """(k, turn) -> an iterable of its samples."""
    seed: int
    """Before each sample the generators are seeded from (seed, k, place)."""
    stretch: int
    """Samples taken from it at a time."""
    state_every: float
    """Seconds between two records of the source's state."""
    states: Path | None
    """The file of these records; None: there are none."""
    name: str
    """Of the whole stream: records of another stream are not used."""
    tell_once: Callable[[str, str], None]
    """Logs a line, unless a line of this kind has been logged: kind, line."""


class Reader:
    """A substream that is open in this process. `at` is the place of the next sample."""

    def __init__(self, of: Substream) -> None:
        self.of, self.k, self.at, self.turn, self.begin = of, of.k, 0, -1, 0
        self._source: Any = None
        self._iterator: Iterator[Any] | None = None
        self._states = _States(of)
        self._due = time.monotonic() + of.state_every
        self._recorded: dict[str, Any] = {}
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
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # from a user's source; a GeneratorExit too
            self._source = None  # its iterator has ended too early
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
            self._recorded = {}
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
                f"substream {self.k} is read from the beginning to sample {place:,}, where the run resumes, and so "
                "are others; sources with seek_sample(n), or state_dict() and load_state_dict(), resume faster",
            )
        self._read_forward(place)

    def _read_forward(self, place: int) -> None:
        told = time.monotonic()
        while self.at < place:
            self._next()
            if time.monotonic() - told > TOLD:
                told = time.monotonic()
                log.warning("substream %d: at %s of %s samples", self.k, f"{self.at:,}", f"{place:,}")
                activity.declare_busy(3 * TOLD)  # this is no hang

    def _enter(self, turn: int) -> None:
        """Open the source for a turn; `begin` must be the place where the turn begins."""
        # a source that divides itself among loader processes, as Hugging Face's, would leave samples out
        torch.utils.data._utils.worker._worker_info = None
        seed_host(derive(self.of.seed, "turn of a stream", self.k, turn))
        self.turn, self._source, self._iterator = turn, self.of.source(self.k, turn), None

    def _next(self) -> Any:
        while True:
            self._record_source()
            seed_host(derive(self.of.seed, "stream", self.k, self.at))
            if self._iterator is None:
                self._iterator = iter(self._source)
            sample = next(self._iterator, END)
            if sample is not END:
                self.at += 1
                if self._recorded:
                    self._marks.append(_mark(sample))
                return sample
            self._next_turn()

    def _next_turn(self) -> None:
        if self.at == self.begin:
            raise EndedByData(
                f"substream {self.k} of the training data has no samples in its turn {self.turn}; use fewer substreams"
            )
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
                f"substream {self.k} of the training data: seek_sample({wanted}) returned {reached}; return the number "
                "of skipped samples, fewer only at the end"
            )
        self.at = self.begin + reached
        if reached < wanted:
            self._next_turn()

    def _is_stateful(self) -> bool:
        return hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")

    def _record_source(self) -> None:
        """Store the source's own state from time to time, once the samples that follow it are known."""
        if self._recorded and len(self._marks) == CHECKED:
            self._states.keep(self._recorded | {"next": self._marks})
            self._recorded = {}
        if self._recorded or not self._iterator or not self.of.states or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self.of.state_every
        if self._is_stateful() and not hasattr(self._source, "seek_sample"):
            try:
                state = _as_json(self._source.state_dict())
            except Exception as error:
                self._due = math.inf
                why = f"{type(error).__name__}: {error}"
                self.of.tell_once("json", f"substream {self.k}: its state is not stored, a resume reads forward: {why}")
                return
            self._recorded = {"place": self.at, "turn": self.turn, "begin": self.begin, "state": state}
            self._marks = []

    def _restore(self, place: int) -> bool:
        """Resume from the newest state before a place, if the samples that follow are the recorded ones."""
        for entry in self._states.before(place - CHECKED):
            with suppress(Exception):  # a damaged state may raise anything
                self._enter(entry["turn"])
                self._source.load_state_dict(entry["state"])
                self.at, self.begin = entry["place"], entry["begin"]
                if [_mark(self._next()) for _ in range(CHECKED)] == entry["next"]:
                    return True
            self.of.tell_once(
                "state",
                f"substream {self.k}: the source does not resume at its state as before, so it is read forward; a "
                "shuffle buffer is often not part of the state",
            )
            self.at = self.begin = 0
            self._enter(0)
        return False


def _mark(sample: Any) -> str:
    """A digest that identifies a sample."""
    return hashlib.sha256(json.dumps(digest(sample, whole=True)).encode()).hexdigest()[:8]


def _as_json(state: Any) -> Any:
    """A copy of a source's state, as read back from a file.

    Raises:
        ValueError: it is too large, or changes in JSON. `json` may raise other errors.
    """
    text = json.dumps(state)
    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text):,} characters, and the maximum is {LARGEST:,}")
    if (copied := json.loads(text)) != state:
        raise ValueError("it changes when it is written as JSON and read back")
    return copied


class _States:
    """The states of a substream's source at some places, in a file of the run: they only save time.

    Older ones are thinned out, so that for any place there is one at most about twice as old as needed.
    """

    def __init__(self, of: Substream) -> None:
        self.of, self.path = of, of.states

    def before(self, place: int) -> list[dict[str, Any]]:
        """The states at or before a place, the newest first."""
        return [entry for entry in self._read()[::-1] if entry["place"] <= place]

    def keep(self, entry: dict[str, Any]) -> None:
        """Store the state that a source had at a place."""
        kept = self._read()
        if kept and kept[-1]["place"] >= entry["place"]:
            return  # another process reads the same, or the run was further before
        newest = kept[-1]["number"] + 1 if kept else 1
        kept = [*kept, {"number": newest, **entry}]
        kept = [it for it in kept if it["number"] > newest - 2 * (it["number"] & -it["number"])]
        assert self.path
        temporary = temporary_name(self.path)
        with suppress(OSError):  # a full disk is reported elsewhere, by files that must be written
            self.path.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps({"of": self.of.name, "sha256": self._sum(kept), "kept": kept}))
            temporary.replace(self.path)  # not synced, as there may be thousands of them: see `_read`

    def _read(self) -> list[dict[str, Any]]:
        """The states of this substream, by place; a file that is damaged, changed or of another one is ignored.

        Nothing in it is used before its checksum is verified: a wrong place would lead to wrong samples.
        """
        try:
            found = read_json(self.path) if self.path else {}
            if not found:
                return []
            kept: list[dict[str, Any]] = found["kept"]
            if found["of"] != self.of.name:
                why = "of another stream"
            elif "sha256" not in found:
                why = "it has no sha256, as in older versions"
            elif found["sha256"] == self._sum(kept):
                return kept
            else:
                why = "its sha256 is not that of its content"
        except (OSError, ValueError, LookupError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
        self.of.tell_once("spoilt", f"{self.path}: not used: {why}")
        return []

    def _sum(self, kept: Any) -> str:
        return hashlib.sha256(json.dumps([self.of.name, self.of.k, kept]).encode()).hexdigest()

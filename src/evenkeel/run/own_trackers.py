"""--tracker FILE.py:CLASS: a tracker of one's own, in a thread of rank 0, so that a slow one delays no step.

RUN/trackers/NAME.jsonl has the last step of each metric that it was given. So a step that is done again after a kill is
not logged twice; as with W&B, the first values stay. It is written before each call: after a `kill -9` the report that
was on its way may be missing. Others that the tracker has missed, as it was slow or off, are in metrics.jsonl: it gets
them at the next start.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..common.errors import Ended, Refusal, place_of
from ..common.files import alike, append_json, write_json
from ..common.user_code import load_name
from .records import read_record, values_of
from .trackers import FINISHED, INIT_TIMEOUT, MetricsTracker, Opener

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Reports that may wait for a slow tracker; with more it is off."""

PATIENCE, PATIENCE_AT_THE_END = 5.0, 60.0
"""Seconds that a run that stops, or has finished, waits for the reports that are left."""

CALLS: dict[str, tuple[Any, ...]] = {"log(metrics, step)": (None, {}, 0), "close(status)": (None, "")}
MADE_BY = "NAME(name, directory, config)"


def load(names: Iterable[str]) -> dict[str, Opener]:
    """What makes each tracker, by its name on the command line.

    Raises:
        Refusal: there is no such class, or it lacks one of the two methods.
    """
    return {name: partial(OwnTracker, name, _class(name)) for name in dict.fromkeys(names)}


def _class(name: str) -> Callable[..., MetricsTracker]:
    label, (source, _, attribute) = f"--tracker {name}", name.rpartition(":")
    if not source or not attribute:
        raise Refusal(f"{label}: give FILE.py:CLASS or PACKAGE.MODULE:CLASS")
    found: Any = load_name(name, label)
    if not isinstance(found, type):
        what = "does not exist" if found is None else "is not a class"
        raise Refusal(f"{label}: {attribute} {what} in {source}")
    for call, arguments in CALLS.items():
        method = getattr(found, call.partition("(")[0], None)
        if not (callable(method) and _takes(method, *arguments)):
            raise Refusal(f"{label}: {attribute} must define {' and '.join(CALLS)}")
    if not _takes(found, "", Path(), {}):
        raise Refusal(f"{label}: is made as {MADE_BY.replace('NAME', attribute)}; take these three")
    return found


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it is written in C, and says nothing
        pass
    return True


class OwnTracker:
    """Makes and calls a user's tracker in one thread, because some trackers know their run by the thread.

    After an error it raises that, from the next call on; `Tracker.send` then turns it off.
    """

    def __init__(
        self, label: str, make: Callable[..., MetricsTracker], name: str, directory: Path, config: Mapping[str, Any],
        step: int,
    ) -> None:  # fmt: skip
        self._label, self._make = label, partial(make, name, directory, dict(config))
        self._given = _Given(directory / "trackers" / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', label)}.jsonl")
        self._reports = queue.Queue[tuple[int, dict[str, float | Path]] | str](MOST_WAITING)
        self._error: Ended | None = None
        self._made = threading.Event()
        earlier = directory / "metrics.jsonl"
        self._earlier = partial(_logged, earlier, earlier.stat().st_size if earlier.exists() else 0, step)
        self._thread = threading.Thread(target=self._run, name=f"tracker {label}", daemon=True)
        self._thread.start()
        # like W&B; and a process that is forked while a module is imported could not import it any more
        self._made.wait(INIT_TIMEOUT)
        self._raise()

    def log(self, metrics: Mapping[str, float | Path], step: int) -> None:
        """Leave a report to the thread."""
        self._raise()
        try:
            self._reports.put_nowait((step, dict(metrics)))
        except queue.Full:
            raise Ended(f"{MOST_WAITING} reports wait for it") from None

    def close(self, status: str) -> None:
        """Wait until it has taken all reports and is closed, but not for long."""
        patience = PATIENCE_AT_THE_END if status == FINISHED else PATIENCE
        until = time.monotonic() + patience
        with contextlib.suppress(queue.Full):
            self._reports.put(status, timeout=patience)
        self._thread.join(max(0.0, until - time.monotonic()))
        self._raise()
        if self._thread.is_alive():
            left = sum(not isinstance(it, str) for it in [*self._reports.queue])
            log.warning("%s: not closed after %.0f s, %d reports are not sent", self._label, patience, left)

    def _raise(self) -> None:
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            self._given.begin()
            theirs = self._make()
            self._made.set()
            for step, values in self._earlier():
                if new := self._given.new(step, values):
                    theirs.log(new, step)
            self._given.forbid()
            while not isinstance(report := self._reports.get(), str):
                step, metrics = report
                if new := self._given.new(step, metrics):
                    theirs.log(new, step)
            theirs.close(report)
        except BaseException as error:  # sys.exit as well: it would end this thread without a line
            place = place_of(error.__traceback__)
            self._error = Ended(f"{type(error).__name__}: {error}{place}".replace("\n", " "))
            self._made.set()


def _logged(path: Path, size: int, step: int) -> list[tuple[int, dict[str, float]]]:
    """The metrics up to a step in the first `size` bytes of a metrics.jsonl, each step as last done."""
    found: list[tuple[int, dict[str, float]]] = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        while file.tell() < size:
            record = read_record(file.readline())
            if record and record["kind"] == "start":  # later steps are done again, or were lost
                found = [it for it in found if it[0] <= record["step"]]
            elif record and (values := values_of(record)):
                epoch = {"epoch": record["epoch"]} if "epoch" in record else {}
                found.append((record["step"], {k: math.nan if v is None else v for k, v in (epoch | values).items()}))
    return [it for it in found if it[0] <= step]


class _Given:
    """Which reports the tracker was given, in this attempt and in earlier ones of the run: a line of JSON for each."""

    def __init__(self, path: Path) -> None:
        self._path, self._last, self._before = path, dict[str, int](), dict[str, int]()

    def begin(self) -> None:
        """Read the file, and write what is known so far as one line."""
        path = self._path
        path.parent.mkdir(exist_ok=True)
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError, RecursionError):  # a damaged line: its report may be logged twice
                if alike(found := json.loads(line), {"": 0}):
                    self._last |= found
        write_json(path, self._last, indent=None)
        self.forbid()

    def forbid(self) -> None:
        """From here on, leave out what was given so far."""
        self._before = dict(self._last)

    def new(self, step: int, metrics: Mapping[str, float | Path]) -> dict[str, float | Path]:
        """The metrics that no earlier attempt has logged for this step; records them as given."""
        found = {name: value for name, value in metrics.items() if step > self._before.get(name, -1)}
        if found:
            given = dict.fromkeys(found, step)
            self._last |= given
            append_json(self._path, given)  # not synced: this is for kills
        return found

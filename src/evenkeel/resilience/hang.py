"""Detect hangs: find the rank that is stuck, save a snapshot, and restart.

A frozen rank (a stopped process, a file system that does not answer, a deadlock, a cut cable) stops all others in the
next collective until its time-out, and then the cause is unknown. So each rank reports to the others once a second,
through torchrun's store, what it is doing. A rank that has made no progress for too long raises an alarm. Every rank
that still runs saves the committed state, as after a signal, and finds out which rank is where (`diagnosis`). Then
torchrun or the keepers restart the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..common.phases import COMPILATION, activity
from ..distributed.rendezvous import is_served
from ..distributed.world import World
from . import heartbeat
from .beats import Beat, beat_now
from .late_dump import LateDump
from .news import News

log = logging.getLogger(__name__)

ALARM = "alarm"
"""Key in the store: a hang was found."""

PATIENT = "patient"
"""Key in the store: the rank that compiles or waits for a slow disk, and its beat."""

LEFT = "left"
"""Key in the store, with a rank: it has finished its part, and no longer beats."""

HUNG = "hung"
"""Key in the store, with a frozen rank: which ranks hung (`beats.hung`)."""

WATCH = "watch"
"""Prefix of these keys."""

STORE_TIMEOUT = 5.0
"""Seconds for an answer of the store, whose machine may be gone."""


class Watch:
    """A context in which this rank beats, and watches for a hang of any rank. All ranks enter it together.

    Args:
        timeout: seconds without any change on this rank that count as a hang. 0: beat, but do not watch.
        world: this process among the others.
        store: of this attempt only; None if this process is alone.
        logs: folder for stacks.
        on_alarm: is called once, by a thread, when any rank has found a hang (`Ending.hung`, by the interruption).
        news: is told with the beats.

    Attributes:
        store: the part of it that is the watch's.
        interval: seconds between two beats.
        first_beats: of all ranks, when they entered.
        late_dump: a timer that writes the stacks if this watch cannot run.
    """

    def __init__(
        self,
        timeout: float,
        world: World,
        store: Store | None,
        logs: Path,
        on_alarm: Callable[[], None],
        news: News | None = None,
    ) -> None:
        self.timeout, self.world, self.logs = timeout, world, logs
        self.interval = max(1.0, world.world_size / 500)  # the store serves some thousand requests a second
        self._on_alarm, self._news = on_alarm, news
        self.store = PrefixStore(WATCH, store) if store else None
        self._alarm, self._stopped = threading.Event(), threading.Event()
        self._patient = b""  # the last value read at PATIENT
        self._stacks: IO[bytes] | None = None
        self.late_dump, self.first_beats = LateDump(), list[Beat]()

    def __enter__(self) -> Watch:
        first = beat_now(self.world)
        if self.store:  # before the others go on: this rank may be frozen before its thread beats
            self._set_beat(self.store, first)
        self.first_beats = self.world.all_gather(first)
        heartbeat.start(self.world.rank, self._stopped, self.timeout)
        if self.store:
            threading.Thread(target=self._beat, args=(self.store.clone(),), name="beat", daemon=True).start()
        if self.timeout:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.store and kind is None:
            with contextlib.suppress(RuntimeError):  # the store may have ended with rank 0
                self.store.set(f"{LEFT}/{self.world.rank}", "")
        self.end()

    def end(self) -> None:
        """Stop watching, and delete an empty file of stacks."""
        self._stopped.set()
        self.late_dump.cancel()
        with contextlib.suppress(OSError):
            if self._stacks and os.fstat(self._stacks.fileno()).st_size == 0:
                Path(self._stacks.name).unlink()

    def _beat(self, store: Store) -> None:
        count = 0
        while not self._stopped.wait(self.interval if count else 0):
            count += 1
            try:
                store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
                self._report_and_read(store, count)
            except (RuntimeError, OSError, MemoryError) as error:  # such as DistStoreError and DistNetworkError
                log.info("cannot reach the other ranks: %s", str(error).split("\n")[0])
                with contextlib.suppress(RuntimeError):
                    if is_served(store):  # if nothing listens, torch would print a stack of C++
                        store = store.clone()  # one slow answer must not silence a healthy rank for ever

    def _report_and_read(self, store: Store, count: int) -> None:
        """Report on this rank, and read what others have reported; the store may raise a RuntimeError."""
        self._set_beat(store, beat_now(self.world, count))
        if self._news:
            self._news.share(store)
        self._share_patience(store, count)
        if self._alarm.is_set():
            store.set(ALARM, "")
        elif store.check([ALARM]):
            self._alarm.set()

    def _set_beat(self, store: Store, beat: Beat) -> None:
        store.set(f"rank/{self.world.rank}", json.dumps(asdict(beat)))

    def _share_patience(self, store: Store, count: int) -> None:
        """Report that this rank compiles or waits for a slow disk; to wait for such a rank is progress, too."""
        if activity.is_patient():
            store.set(PATIENT, f"{self.world.rank} {count}")
        # a rank that compiles does not count this as progress: if that takes too long, it is the one that hangs
        elif activity.phase != COMPILATION and store.check([PATIENT]):
            before, self._patient = self._patient, store.get(PATIENT)
            if self._patient != before:
                activity.marks += 1

    def _watch(self) -> None:
        marks, idle = -1, 0.0
        tick = min(self.interval, self.timeout / 4)
        while not self._alarm.wait(tick):
            if self._stopped.is_set():
                self.late_dump.cancel()  # this thread may have set it after `end`
                return
            if activity.marks != marks or activity.is_patient():
                marks, idle = activity.marks, 0.0
                with contextlib.suppress(OSError, RuntimeError):  # the system may have no more threads
                    self.late_dump.put_off(self.timeout * 1.5, self.stacks)
            else:
                idle += tick  # by ticks, because a suspended process is not a hanging one
            if idle >= self.timeout:
                self._alarm.set()
        if not self._stopped.is_set():
            self._on_alarm()

    @property
    def stacks(self) -> IO[bytes]:
        """This rank's file for stacks, opened at the first use; `end` deletes it if it is empty."""
        if not self._stacks:
            self._stacks = (self.logs / f"rank-{self.world.rank}.stacks.txt").open("ab")
        return self._stacks

"""Detect hangs: report which rank is stuck where, save a snapshot, and restart.

A frozen rank (a stopped process, a file system that does not answer, a deadlock, a cut cable) stops all others in the
next collective until its time-out, and then the cause is unknown. So each rank reports to the others once a second,
through torchrun's store, what it is doing. A rank that has made no progress for too long raises an alarm. Every rank
that still can then saves the committed state, as after a signal, and writes its Python stacks. The lowest live rank
prints one line that says which rank is where, and torchrun restarts the job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..common import keeper_link
from ..common.phases import COMPILATION, COMPILE_TIMEOUT, activity
from ..common.processes import stat
from ..distributed.devices import device_name, node_name
from ..distributed.world import World
from . import flight_recorder, heartbeat
from .beats import Beat, Outlook, blamed, describe

log = logging.getLogger(__name__)

ALARM, SAVED, COMPILING = "alarm", "saved", "compiling"
"""Keys in the store: a hang was found; the step of rank 0's last complete checkpoint; the rank that compiles."""

FLIGHT = "flight"
"""Folder for the last collectives, among the logs of an attempt."""

STORE_TIMEOUT, COMPARE_TIMEOUT = 5.0, 5.0
"""Seconds for an answer of the store, whose machine may be gone, and for the comparison of collectives, which takes
minutes with thousands of ranks while the restart waits for this process."""


class Watch:
    """A context in which this rank beats, and watches for a hang of any rank. All ranks enter it together.
    After an alarm: diagnose, explain, is_within_reach, kill_frozen, write_collectives, compare_collectives.

    Args:
        timeout: seconds without any change on this rank that count as a hang. 0: beat, but do not watch.
        world: this process among the others.
        store: of this attempt only; None if this process is alone.
        logs: folder for stacks.
        alarmed: is called once, by a thread, when any rank has found a hang.
        saved: is called on each node with the step of each checkpoint that rank 0 has completed.

    Attributes:
        outlook: on all ranks, once :meth:`explain` has returned; None if the other ranks cannot be asked.
    """

    def __init__(
        self,
        timeout: float,
        world: World,
        store: Store | None,
        logs: Path,
        alarmed: Callable[[], None],
        saved: Callable[[int], None] = lambda _step: None,
    ) -> None:
        self.timeout, self.world, self.logs = timeout, world, logs
        self.interval = max(1.0, world.world_size / 500)  # the store serves some thousand requests a second
        self._alarmed, self._saved = alarmed, saved
        self._store = PrefixStore("watch", store) if store else None
        self._alarm, self._stopped = threading.Event(), threading.Event()
        self._announced, self._seen = 0, 0  # steps of checkpoints: one to announce (0: none), the last one read of
        self._compiling = b""  # the last value read at COMPILING
        self._first_beats, self._frozen = list[Beat](), list[Beat]()  # all ranks at the start; those to kill
        self.outlook: Outlook | None = None
        self._diagnosing = threading.Thread(target=self._diagnose, name="diagnose", daemon=True)

    def __enter__(self) -> Watch:
        self._first_beats = self.world.gather(self._beat_now(0))
        heartbeat.start(self.world.rank, self._stopped, self.timeout)
        if self._store:
            threading.Thread(target=self._beat, args=(self._store.clone(),), name="beat", daemon=True).start()
        if self.timeout:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop watching, and delete an empty file of stacks."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            if "_stacks" in self.__dict__ and Path(self._stacks.name).stat().st_size == 0:
                Path(self._stacks.name).unlink()

    def announce_saved(self, step: int) -> None:
        """Tell all nodes of a complete checkpoint, with rank 0's next beat."""
        self._announced = step

    def diagnose(self) -> None:
        """Start to write this rank's stacks and to find out which rank is where, after an alarm; returns at once."""
        self._diagnosing.start()

    def explain(self) -> str:
        """Return which rank is where, once :meth:`diagnose` knows; the lowest live rank prints it."""
        self._diagnosing.join(STORE_TIMEOUT + 3 * self.interval)
        me = self.world.rank
        here = describe({me: self._beat_now(0)}, [])
        # the store is on rank 0's node, so suspect rank 0 if it does not answer
        silent = "rank 0 does not answer any more, or the network is down" if me else "the job's store does not answer"
        found = self.outlook or Outlook(f"{silent}; {here}", me, self._first_beats[:1] if me else [], [])
        self._frozen = found.frozen
        text = f"no progress for {self.timeout:g} s: {found.where}; stacks are in {self.logs}"
        if me == found.lowest:
            print(f"evenkeel: {text}", file=sys.stderr, flush=True)
        return text

    def write_collectives(self) -> None:
        """Write the last collectives. Must come last, because torch may hang in this too."""
        with contextlib.suppress(Exception):
            (self.logs / f"rank-{self.world.rank}.collectives.json").write_bytes(flight_recorder.as_json())
            flight_recorder.write(self.logs / FLIGHT, self.world.rank)

    def compare_collectives(self) -> None:
        """Log the verdict of `torchfrtrace` on the collectives of all ranks, on the lowest live rank."""
        if not self.outlook or self.world.rank != self.outlook.lowest or self.world.world_size == 1:
            return
        frozen = {(beat.host, beat.pid) for beat in self._frozen}
        live = [rank for rank, beat in enumerate(self._first_beats) if (beat.host, beat.pid) not in frozen]

        def compare() -> None:
            # an assertion in torch ends the analysis of some traces, and older releases have no analysis
            with contextlib.suppress(Exception):
                for line in flight_recorder.verdicts(self.logs / FLIGHT, self.world.world_size, live):
                    log.info("flight recorder: %s", line)
                    print(f"evenkeel: flight recorder: {line}", file=sys.stderr, flush=True)

        comparing = threading.Thread(target=compare, name="compare", daemon=True)
        comparing.start()
        comparing.join(COMPARE_TIMEOUT)

    def is_within_reach(self) -> bool:
        """Whether each frozen rank is on a node with a live rank, which can kill it; else its node may be gone."""
        frozen = {(beat.host, beat.pid) for beat in self._frozen}
        alive = {beat.host for beat in self._first_beats if (beat.host, beat.pid) not in frozen}
        return self.outlook is not None and {host for host, _ in frozen} <= alive

    def kill_frozen(self) -> None:
        """Kill the frozen ranks of this node, for which torchrun would wait 30 s before it restarts the others."""
        for beat in self._frozen:
            found = stat(beat.pid) if beat.host == socket.gethostname() else None
            above = stat(found.parent) if found else None
            parents = (found and found.parent, above and above.parent)  # torchrun, or the keeper below it
            if keeper_link.launcher() in parents:  # still that process, and of our torchrun
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)

    def _beat(self, store: Store) -> None:
        count = 0
        while not self._stopped.wait(self.interval if count else 0):
            count += 1
            try:
                store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
                self._report_and_read(store, count)
            except RuntimeError as error:  # such as DistStoreError and DistNetworkError
                log.info("cannot reach the other ranks: %s", str(error).split("\n")[0])
                with contextlib.suppress(RuntimeError):
                    store = store.clone()  # one slow answer must not silence a healthy rank for ever

    def _beat_now(self, count: int) -> Beat:
        device = device_name(self.world.device) if self.world.device.type == "cuda" else ""
        return Beat(count, activity.step, activity.phase, socket.gethostname(), os.getpid(), node_name(), device)

    def _report_and_read(self, store: Store, count: int) -> None:
        """Report on this rank, and read of checkpoints, compilations and alarms."""
        store.set(f"rank/{self.world.rank}", json.dumps(asdict(self._beat_now(count))))
        if announced := self._announced:
            store.set(SAVED, str(announced))
            self._announced = 0 if self._announced == announced else self._announced
        if self.world.local_rank == 0 and store.check([SAVED]) and (step := int(store.get(SAVED))) > self._seen:
            self._seen = step
            self._saved(step)
        if _compiles():
            store.set(COMPILING, f"{self.world.rank} {count}")
        elif activity.phase != COMPILATION and store.check([COMPILING]) and store.get(COMPILING) != self._compiling:
            self._compiling = store.get(COMPILING)
            activity.changes += 1  # waiting for a rank that compiles counts as progress
        if self._alarm.is_set():
            store.set(ALARM, "")
        elif store.check([ALARM]):
            self._alarm.set()

    def _watch(self) -> None:
        changes, idle = -1, 0.0
        tick = min(self.interval, self.timeout / 4)
        while not self._alarm.wait(tick):
            if self._stopped.is_set():
                return
            if activity.changes != changes or _compiles():
                changes, idle = activity.changes, 0.0
                with contextlib.suppress(OSError):
                    # if even this thread cannot run, faulthandler writes the stacks without Python
                    faulthandler.dump_traceback_later(self.timeout * 1.5, file=self._stacks)
            else:
                idle += tick  # by ticks, because a suspended process is not a hanging one
            if idle >= self.timeout:
                self._alarm.set()
        if not self._stopped.is_set():
            self._alarmed()

    def _diagnose(self) -> None:
        with contextlib.suppress(Exception):  # a full disk, say
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        with contextlib.suppress(RuntimeError):  # the store does not answer
            self.outlook = self._compare_beats()

    def _compare_beats(self) -> Outlook:
        """Read all ranks' last beats twice to see which stand still; clocks of machines are not compared."""
        if not self._store:
            return Outlook(describe({0: self._beat_now(0)}, []), 0, [], [])
        store = self._store.clone()
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        store.set(ALARM, "")
        names = [f"rank/{rank}" for rank in range(self.world.world_size)]
        first = store.multi_get(names)
        time.sleep(2.5 * self.interval)
        second = store.multi_get(names)
        beats = {rank: Beat(**json.loads(text)) for rank, text in enumerate(second)}
        frozen = [rank for rank in beats if first[rank] == second[rank]]
        lowest = min(beats.keys() - frozen, default=0)
        return Outlook(describe(beats, frozen), lowest, [beats[rank] for rank in frozen], blamed(beats, frozen))

    @cached_property
    def _stacks(self) -> IO[bytes]:
        return (self.logs / f"rank-{self.world.rank}.stacks.txt").open("ab")


def _compiles() -> bool:
    """Whether this rank compiles, and has not exceeded the time limit for that."""
    return activity.phase == COMPILATION and activity.seconds_in_phase() < COMPILE_TIMEOUT

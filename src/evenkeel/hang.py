"""Hangs that end: who is stuck where, a snapshot, and a restart.

A frozen rank (a stopped process, a file system that does not answer, a dead-lock, a cable that is cut) stops all the
others in the next collective, for as long as its time-out, and then nobody knows why. Here each rank tells the
others through torchrun's store, once a second, what it is doing. When nothing has changed on a rank for too long, it
raises an alarm; then every rank that can saves the committed state, as after a signal. Beside that it writes down its
Python stacks, the lowest one says in a line who is where, and torchrun starts the job again.
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from . import heartbeat
from .activity import COMPILATION, REDUCTION, activity
from .compilation import LONGEST
from .devices import device_name
from .processes import stat
from .world import World

log = logging.getLogger(__name__)

ALARM, SAVED, COMPILING = "alarm", "saved", "compiling"
"""Keys in the store: somebody has noticed a hang; the step of rank 0's last complete checkpoint; who compiles, and with
which beat it said so last."""

PATIENCE = 5.0
"""Seconds that an answer of the store may take. It may be on the machine that is gone."""


@dataclass(frozen=True)
class Beat:
    """What a rank last told about itself."""

    count: int
    """Beats so far. One that does not grow is that of a frozen rank."""
    step: int
    phase: str
    host: str
    pid: int
    device: str = ""
    """A GPU by both its names; empty for a CPU."""


class Outlook(NamedTuple):
    """What one rank can see of all."""

    text: str
    """Who is where, in a line."""
    lowest: int
    """The lowest rank that still beats."""
    frozen: list[Beat]
    """Those that do not."""


class Watch:
    """Beats for this rank, and watches for a hang of any. All ranks enter it together.

    Args:
        timeout: seconds without any change on this rank that are a hang. 0: beat, but watch for nothing.
        world: who takes part.
        store: a namespace of this attempt's own; None if this process is alone.
        logs: folder for stacks.
        alarmed: is called once, from a thread of the watch, when this rank or another one has noticed a hang.
        saved: is called on each node when rank 0 tells of another complete checkpoint, with its step.
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
        self._announced, self._seen = 0, 0
        self._compiling = b""
        self._frozen: list[Beat] = []
        self._first_beats: list[Beat] = []
        self._outlook: Outlook | None = None
        self._looking = threading.Thread(target=self._look, name="look", daemon=True)

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
        """Watch no longer. A file of stacks stays only if there is something in it."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()
        stacks = Path(self._stacks.name) if "_stacks" in self.__dict__ else None
        with contextlib.suppress(OSError):
            if stacks and stacks.stat().st_size == 0:
                stacks.unlink()

    def announce_saved(self, step: int) -> None:
        """On rank 0: let all nodes know of a complete checkpoint, with the next beat."""
        self._announced = step

    def look_around(self) -> None:
        """After an alarm: begin to write down the stacks of this rank and to find out who is where; returns at once."""
        self._looking.start()

    def explain(self) -> str:
        """Say who is where, once :meth:`look_around` has found out; the lowest live rank prints it."""
        self._looking.join(PATIENCE + 3 * self.interval)
        # under our launchers rank 0 holds the store, so that it is the one to suspect
        here = describe({self.world.rank: self._beat_now(0)}, [])
        lost = f"rank 0 does not answer any more, or the network is down; {here}"
        suspects = self._first_beats[:1] if self.world.rank else []
        outlook = self._outlook or Outlook(lost, self.world.rank, suspects)
        self._frozen = outlook.frozen
        text = f"no progress for {self.timeout:g} s: {outlook.text}; stacks are in {self.logs}"
        if self.world.rank == outlook.lowest:
            print(f"evenkeel: {text}", file=sys.stderr, flush=True)
        return text

    def write_collectives(self) -> None:
        """Write down the last collectives. Comes last, because torch may hang in it as it does in them."""
        with contextlib.suppress(Exception):
            path = self.logs / f"rank-{self.world.rank}.collectives.json"
            path.write_bytes(b'{"gloo": %s, "nccl": %s, "nccl2": %s}\n' % _collectives())

    def kill_frozen(self) -> None:
        """Kill the frozen ranks of this node, for which torchrun would wait 30 s before it restarts the others."""
        for beat in self._frozen:
            found = stat(beat.pid) if beat.host == socket.gethostname() else None
            if found and found.parent == os.getppid():  # still that process, and a sister of ours
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)

    def _beat(self, store: Store) -> None:
        count = 0
        while not self._stopped.wait(self.interval if count else 0):
            count += 1
            try:
                store.set_timeout(timedelta(seconds=PATIENCE))
                self._exchange_word(store, count)
            except RuntimeError as error:  # DistStoreError and DistNetworkError are such
                log.info("no word to or from other ranks: %s", str(error).split("\n")[0])
                with contextlib.suppress(RuntimeError):
                    store = store.clone()  # one slow answer must not silence a healthy rank for ever

    def _beat_now(self, count: int) -> Beat:
        device = device_name(self.world.device) if self.world.device.type == "cuda" else ""
        return Beat(count, activity.step, activity.phase, socket.gethostname(), os.getpid(), device)

    def _exchange_word(self, store: Store, count: int) -> None:
        store.set(f"rank/{self.world.rank}", json.dumps(asdict(self._beat_now(count))))
        if self._announced:
            store.set(SAVED, str(self._announced))
            self._announced = 0
        if self.world.local_rank == 0 and store.check([SAVED]) and (step := int(store.get(SAVED))) > self._seen:
            self._seen = step
            self._saved(step)
        self._tell_of_compilation(store, count)
        if self._alarm.is_set():
            store.set(ALARM, "")
        elif store.check([ALARM]):
            self._alarm.set()

    def _tell_of_compilation(self, store: Store, count: int) -> None:
        """While a rank compiles, it and those that wait for it make progress."""
        if activity.phase == COMPILATION:
            if activity.seconds_in_phase() < LONGEST:
                store.set(COMPILING, f"{self.world.rank} {count}")
        elif store.check([COMPILING]) and (told := store.get(COMPILING)) != self._compiling:
            self._compiling = told
            activity.changes += 1

    def _watch(self) -> None:
        changes, idle = -1, 0.0
        tick = min(self.interval, self.timeout / 4)
        while not self._alarm.wait(tick):
            if self._stopped.is_set():
                return
            compiling = activity.phase == COMPILATION and activity.seconds_in_phase() < LONGEST
            if activity.changes != changes or compiling:
                changes, idle = activity.changes, 0.0
                with contextlib.suppress(OSError):
                    # should even this thread be kept from running, the stacks are written without Python's help
                    faulthandler.dump_traceback_later(self.timeout * 1.5, file=self._stacks)
            else:
                idle += tick  # by ticks, because a suspended process is not a hanging one
            if idle >= self.timeout:
                self._alarm.set()
        self._alarmed()

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # a full disk, say
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        with contextlib.suppress(RuntimeError):  # the store does not answer
            self._outlook = self._compare_beats()

    def _compare_beats(self) -> Outlook:
        """Read all ranks' beats twice, so that those which stand still show. Clocks of machines are not compared."""
        if not self._store:
            return Outlook(describe({0: self._beat_now(0)}, []), 0, [])
        store = self._store.clone()
        store.set_timeout(timedelta(seconds=PATIENCE))
        store.set(ALARM, "")
        first = self._beats(store)
        time.sleep(2.5 * self.interval)
        second = self._beats(store)
        frozen = [rank for rank, beat in enumerate(second) if beat.count == first[rank].count]
        alive = [rank for rank in range(self.world.world_size) if rank not in frozen]
        beats = dict(enumerate(second))
        return Outlook(describe(beats, frozen), min(alive, default=0), [beats[rank] for rank in frozen])

    def _beats(self, store: Store) -> list[Beat]:
        """The last beat of every rank."""
        texts = store.multi_get([f"rank/{rank}" for rank in range(self.world.world_size)])
        return [Beat(**json.loads(text)) for text in texts]

    @cached_property
    def _stacks(self) -> IO[bytes]:
        return (self.logs / f"rank-{self.world.rank}.stacks.txt").open("ab")


def describe(beats: dict[int, Beat], frozen: list[int]) -> str:
    """Who is where, the likely culprits first: "rank 3 in data loading of step 812; ranks 0-2 wait in ..."."""
    groups: dict[tuple[bool, str, int], list[int]] = {}
    for rank, beat in beats.items():
        groups.setdefault((rank in frozen, beat.phase, beat.step), []).append(rank)

    def innocence(group: tuple[bool, str, int]) -> tuple[bool, bool, int]:
        silent, phase, _ = group
        return not silent, phase == REDUCTION, len(groups[group])

    parts = []
    for group in sorted(groups, key=innocence):
        silent, phase, step = group
        does = "does not answer any more, last seen" if silent else "waits" if phase == REDUCTION else "is"
        if len(groups[group]) > 1:
            does = {"is": "are", "waits": "wait"}.get(does, does.replace("does", "do"))
        which = name_ranks(groups[group])
        if silent and (devices := [f"{beats[r].device} of {beats[r].host}" for r in groups[group] if beats[r].device]):
            which += f" ({', '.join(devices)})"  # perhaps it is the GPU that is to blame
        parts.append(f"{which} {does} in {phase} of step {step + 1}")
    return "; ".join(parts)


def name_ranks(ranks: list[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _collectives() -> tuple[bytes, bytes, bytes]:
    """The last collectives of this rank, from torch's flight recorders, one for each backend
    (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)."""
    recorder: Any = torch._C._distributed_c10d

    def dump(name: str, **which: str) -> bytes:
        try:
            return bytes(getattr(recorder, name)(**which))
        except (AttributeError, TypeError):  # a build without NCCL, a release before 2.15
            return b"{}"

    # "nccl" is a process group with a recorder of its own, or since torch 2.15 one that the general recorder hears
    general = "_dump_fr_trace_json"
    return dump(general), dump("_dump_nccl_trace_json"), dump(general, backend="nccl2")

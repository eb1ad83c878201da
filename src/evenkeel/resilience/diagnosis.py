"""After an alarm: this rank's stacks, which rank is where, and an end to those that are frozen."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import IO, Any

from ..common import keeper_link
from ..common.deadlines import left
from ..common.display import near, say
from ..common.processes import stat
from . import flight_recorder
from .beats import Beat, Findings, beat_now, blamed, describe, hung
from .hang import ALARM, HUNG, LEFT, STORE_TIMEOUT, Watch

log = logging.getLogger(__name__)

FLIGHT = "flight"
"""Folder for the last collectives, among the logs of an attempt."""

COMPARE_TIMEOUT = 5.0
"""Seconds for the comparison of collectives, which takes minutes with thousands of ranks, and for the disk of the
stacks, which may hang: the restart waits for this process."""


class Diagnosis:
    """Writes this rank's stacks and finds out which rank is where, in two threads that start at once: the disk of the
    stacks may be what hangs.

    Args:
        watch: the one that has raised the alarm.

    Attributes:
        findings: on all ranks; until they have answered, only what this rank knows.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self._world, self._logs = watch, watch.world, watch.logs
        me = self._world.rank
        # the store is on rank 0's node, so suspect rank 0 if it does not answer
        silent = "rank 0 does not answer any more, or the network is down" if me else "the job's store does not answer"
        where = f"{silent}; {describe({me: beat_now(self._world)}, [])}"
        self.findings = Findings(where, me, watch.first_beats[:1] if me else [], [])
        self._all_asked = False  # the other ranks have been asked
        self._collectives: dict[str, dict[str, Any]] = {}
        self._expected_by = time.monotonic() + STORE_TIMEOUT + 3 * watch.interval  # when, if the store answers soon
        self._stacks_thread = threading.Thread(target=self._write_stacks, name="stacks", daemon=True)
        self._diagnose_thread = threading.Thread(target=self._diagnose, name="diagnose", daemon=True)
        for thread in (self._stacks_thread, self._diagnose_thread):
            with contextlib.suppress(RuntimeError):  # the system may have no more threads, and the save comes first
                thread.start()

    def explain(self) -> str:
        """Return which rank is where, once the thread knows; the lowest live rank prints it."""
        self._await_findings(self._expected_by)
        if not any(map(_is_stopped, self.findings.frozen)):
            self._await_findings(self._expected_by + STORE_TIMEOUT)  # it is asked twice, and may be slow
        text = f"no progress for {self._watch.timeout:g} s: {self.findings.where}; stacks are in {near(self._logs)}"
        if self._world.rank == self.findings.lowest:
            say(f"evenkeel: {text}", to_stderr=True)
        return text

    @property
    def is_lowest(self) -> bool:
        """Whether this is the lowest live rank; False if the others could not be asked."""
        return self._all_asked and self._world.rank == self.findings.lowest

    def is_within_reach(self) -> bool:
        """Whether each frozen rank is on a node with a live rank, which can kill it; else its node may be gone."""
        sure = self._all_asked  # read before the findings, which the thread sets first
        alive = {beat.host for beat in self._watch.first_beats if not self._is_frozen(beat)}
        return sure and {beat.host for beat in self.findings.frozen} <= alive

    def kill_frozen(self) -> None:
        """Kill the frozen ranks of this node, for which torchrun would wait 30 s before it restarts the others.

        While only the store's silence speaks against rank 0, kill it only if it is stopped. It may be saving: the store
        can be slow, or in another process. If rank 0's own process serves the store, it is silent only if stopped.
        """
        sure = self._all_asked  # read before the findings, which the thread sets first
        for beat in self.findings.frozen:
            process = stat(beat.pid) if beat.host == socket.gethostname() else None
            above = stat(process.parent) if process else None
            parents = (process and process.parent, above and above.parent)  # torchrun, or the keeper below it
            if (sure or _is_stopped(beat)) and keeper_link.starter() in parents:  # still that process, of our torchrun
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGKILL)

    def write_collectives(self) -> None:
        """Write the last collectives, after the stacks. Must come last, because torch may hang in NCCL's too."""
        if self._stacks_thread.is_alive():
            self._stacks_thread.join(COMPARE_TIMEOUT)
        with contextlib.suppress(Exception):
            traces = self._collectives | flight_recorder.taken("nccl", "nccl2")
            text = json.dumps(traces, default=str)
            (self._logs / f"rank-{self._world.rank}.collectives.json").write_text(text)
            flight_recorder.write(traces, self._logs / FLIGHT, self._world.rank)

    def compare_collectives(self) -> None:
        """Log the verdict of `torchfrtrace` on the collectives of all ranks, on the lowest live rank."""
        if not self.is_lowest or self._world.world_size == 1:
            return
        live = [rank for rank, beat in enumerate(self._watch.first_beats) if not self._is_frozen(beat)]

        def compare() -> None:
            # an assertion in torch ends the analysis of some traces, and older releases have no analysis
            with contextlib.suppress(Exception):
                for line in flight_recorder.verdicts(self._logs / FLIGHT, self._world.world_size, live):
                    log.info("flight recorder: %s", line)
                    say(f"evenkeel: flight recorder: {line}", to_stderr=True)

        comparing = threading.Thread(target=compare, name="compare", daemon=True)
        comparing.start()
        comparing.join(COMPARE_TIMEOUT)

    def _is_frozen(self, beat: Beat) -> bool:
        return (beat.host, beat.pid) in {(each.host, each.pid) for each in self.findings.frozen}

    def _await_findings(self, until: float) -> None:
        if self._diagnose_thread.is_alive():
            self._diagnose_thread.join(left(until))

    def _write_stacks(self) -> None:
        """Through memory: no other thread runs while faulthandler writes, and a disk may take for ever."""
        with contextlib.suppress(Exception), _memory_file() as memory:  # a full disk, say
            self._watch.late_dump.cancel()
            faulthandler.dump_traceback(memory, all_threads=True)
            memory.seek(0)
            self._watch.stacks.write(memory.read())
            self._watch.stacks.flush()

    def _diagnose(self) -> None:
        with contextlib.suppress(Exception):
            self._collectives = flight_recorder.taken("gloo")  # once a frozen rank is killed, none is pending any more
        with contextlib.suppress(RuntimeError):  # the store does not answer
            self.findings = self._compare_beats()
            self._all_asked = True

    def _compare_beats(self) -> Findings:
        """Read all ranks' last beats twice to see which stand still; clocks of machines are not compared."""
        if not self._watch.store:
            return Findings(describe({0: beat_now(self._world)}, []), 0, [], [])
        store = self._watch.store.clone()
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        store.set(ALARM, "")
        names = [f"rank/{rank}" for rank in range(self._world.world_size)]
        first = store.multi_get(names)
        time.sleep(2.5 * self._watch.interval)
        second = store.multi_get(names)
        still = [rank for rank, text in enumerate(second) if text == first[rank]]
        departed = {rank for rank in still if store.check([f"{LEFT}/{rank}"])}
        beats = {rank: Beat(**json.loads(text)) for rank, text in enumerate(second) if rank not in departed}
        frozen = [rank for rank in still if rank not in departed]
        lowest = min(beats.keys() - frozen, default=0)
        text = hung(beats, frozen)
        for rank in frozen:
            store.set(f"{HUNG}/{rank}", text)  # before it is killed: its keeper asks why
        where, silent = describe(beats, frozen), [beats[rank] for rank in frozen]
        return Findings(where, lowest, silent, blamed(beats, frozen), text)


def _is_stopped(beat: Beat) -> bool:
    process = stat(beat.pid) if beat.host == socket.gethostname() else None
    return process is not None and process.state == "T"


def _memory_file() -> IO[bytes]:
    """A file in memory; where there are none, a temporary one."""
    return os.fdopen(os.memfd_create("stacks"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()

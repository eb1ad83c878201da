"""Saving in a sharded run: every rank copies each step into its slots, and writes its rows of every checkpoint."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from functools import cached_property
from typing import Any

from ..common import keeper_link
from ..common.deadlines import FOREVER
from ..common.phases import CHECKPOINT, COMMIT, REDUCTION, activity
from ..distributed.world import World
from ..resilience.memory_checkpoint import rank_memory
from ..training.replica import Replica
from ..training.seqlock import Torn
from ..training.slots import Slots
from ..training.state import State
from .checkpoint import WRITER_TIMEOUT, known_step, label_of
from .saver import NOTHING_NEW, Saver
from .sharded_checkpoint import ROWS_TIMEOUT, await_whole, write_rows, write_slots

log = logging.getLogger(__name__)

LAST_STEP = 1.0
"""Seconds that a rank that is stopped may take to commit the step that it reduces; the others may have done so."""

LAST_WAIT = 5.0
"""Seconds that rank 0 waits after a stop signal for the rows of the others, to report what is saved."""


class ShardedSaver(Saver):
    """As `Saver`, on all ranks of a sharded run.

    Attributes:
        token: the same on all ranks; once the run has been resumed.
        writes: whether this rank writes planned checkpoints. With --shard N only the first replica does.
    """

    token, writes = "", True
    _replica: Replica | None = None

    @cached_property
    def _descriptors(self) -> list[int]:
        return rank_memory.slots()

    @cached_property
    def slots(self) -> Slots:
        """This rank's rows of the last two steps."""
        return Slots(self._descriptors[:2], self._devices)

    def replicate(self, world: World, step: int) -> bool:
        """Copy this rank's rows to another node from here on (--replicate), first those of this step, if it is not 0.
        Returns whether that is possible. Every rank must call it, and may then discard what it has of other steps."""
        self._replica = Replica(world, self._descriptors[2:])
        if step:
            self._replica.exchange(self.slots.holding(step))
        else:
            self._replica.clear()
        world.all_gather(None)  # until here a lost node may need the step before
        return self._replica.possible

    def store_step(self, state: State) -> None:
        """Copy the step that was just done; raises NonFinite if it was not."""
        state.settle()
        with activity.during(CHECKPOINT):
            self._store(state)
            if self._replica:
                self._replica.exchange(self.slots.holding(state.step))

    def _store(self, state: State, until: float = FOREVER, final: bool = False) -> None:
        label = label_of(self.checkpoints, state.step, {}, "snapshot") | {"token": self.token}
        # the latest: if a GPU hangs in that step, a copy would be the step before once more, in the place of the one
        # that may be the newest of another rank
        self.slots.write(lambda slot: state.capture(until, slot, final, latest=True), label, until)

    def write_slots(self) -> None:
        """Write what is in this rank's slots, so that other ranks' files of these steps become whole checkpoints."""
        with suppress(OSError):  # then the run goes on from an older one
            write_slots(self._descriptors, time.monotonic() + WRITER_TIMEOUT)

    def start(self, state: State, metrics: dict[str, float]) -> None:
        """As `Saver.start`, on ranks that write."""
        if self.writes:
            super().start(state, metrics)

    def _write(self, captured: dict[str, Any], metrics: dict[str, float]) -> None:
        write_rows(self.checkpoints, captured, metrics, "checkpoint", self.token)
        if captured["rows"]["rank"] == 0:
            await_whole(self.checkpoints, captured["step"], ROWS_TIMEOUT)
            self._on_written(captured["step"])

    def save_last(self, state: State, metrics: dict[str, float]) -> None:
        """As `Saver.save_last`, on every rank."""
        if self.writes:
            super().save_last(state, metrics)

    def rescue(self, state: State, in_place: bool = False) -> str:
        """Save this rank's rows of the last two steps; see `Saver.rescue`. No other rank has them.

        Ranks that start again in place find them in memory, so nothing is written then.
        """
        begun, grace, before = time.monotonic(), self._grace, state.step
        half_time = begun + grace / 2  # from here on --grace is for writing
        until = begun + min(LAST_STEP, grace / 4) * (threading.current_thread() is not threading.main_thread())
        committing = (REDUCTION, CHECKPOINT, COMMIT)  # in the main thread; if that is here, after an error, none comes
        while not in_place and state.step == before and activity.phase in committing and time.monotonic() < until:
            time.sleep(0.01)
        if state.step == 0:
            return NOTHING_NEW
        reserved = self._staging.reserve(begun + grace / 4)  # a checkpoint that is being written comes first
        try:
            if state.step > max(self.slots.steps(), default=0):  # stopped between the commit and the copy
                with suppress(Torn):
                    self._store(state, half_time, final=True)
            steps = self.slots.freeze(half_time)
            if not steps:
                return NOTHING_NEW
            if in_place and keeper_link.has_keeper():
                log.info("stored step %d in memory after %.2f s", steps[-1], time.monotonic() - begun)
                return f"step {steps[-1]} is in memory"
            write_slots(self._descriptors, half_time)
            if state.sharding and state.sharding.rank == 0:
                with suppress(OSError):
                    await_whole(self.checkpoints, steps[-1], min(LAST_WAIT, grace / 4))
        except (OSError, Torn, RuntimeError) as error:  # the RuntimeError is from a failed GPU
            log.error("NOT SAVED: %s; the last checkpoint is at step %s", error, known_step(self.checkpoints))
            return f"not saved ({error})"
        finally:
            if reserved:
                self._staging.release()
        log.info("saved this rank's rows of steps %s in %.2f s", steps, time.monotonic() - begun)
        whole = self.checkpoints.newest_step()
        if whole >= steps[0]:
            return f"step {whole} is saved"
        return f"the rows of step {steps[-1]} of this rank are saved"  # no complete checkpoint

"""When a checkpoint is due, and its result. Digests and compiled code are stored at the same time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..common.display import near
from ..common.files import is_full
from ..common.phases import CHECKPOINT, activity
from ..common.repeats import Repeats
from ..data.data_digest import TRAINING
from ..training import compilation
from ..training.digest import digests
from ..training.state import State
from ..training.state_dicts import local_rows
from .attempt import Attempt
from .chain import options_digest, samples_digest, whole_steps
from .checkpoint import known_step
from .saver import Saver
from .sharded_saver import ShardedSaver

log = logging.getLogger(__name__)

SLOWEST = 1e7
"""Bytes per second that a disk takes at least, or a wait for it counts as a hang."""


class Checkpointer:
    """Saves the state while training goes on: on rank 0, or in a sharded run on all."""

    def __init__(self, attempt: Attempt, state: State) -> None:
        config, plan = attempt.config, attempt.plan
        self._attempt, self._state, self._compilations = attempt, state, -1
        self._failures = Repeats()
        self.announce: Callable[[int], None] = lambda _step: None
        """Called with the step of each complete checkpoint, for the other nodes."""
        if config.digest_every and attempt.lead:
            self._sampler = whole_steps(attempt.sets[TRAINING], config, plan.micro_batch, plan.fixed_micro_batches)
            self._options = options_digest(attempt.options, attempt.harmless)
        make = ShardedSaver if config.shard != "off" else Saver
        self.saver = make(attempt.checkpoints, attempt.world, config, self._record_saved)

    def after_step(self, metrics: dict[str, float]) -> None:
        """Report an evaluation, and save if a checkpoint is due or the evaluation is among the best.

        Called after each step but the last, and after an evaluation that a resumed run repeats. A checkpoint that
        cannot be written is reported with the next step, and training goes on: the old one stays.

        Args:
            metrics: of this step; empty if it was not evaluated.
        """
        state, saver, lead = self._state, self.saver, self._attempt.lead
        if not (lead or state.sharding):
            return
        saver.pin(state)
        self.record_digests()
        due = self._attempt.config.saves_at(state.step)
        self.pack_compiled(due)
        if saver.done or (saver.busy and (due or metrics)):
            self.take_result()
        if metrics and lead:
            lead.tracker.evaluation(state.step, metrics)
        if due or (metrics and self._improves(metrics)):
            saver.start(state, metrics)

    def _improves(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is among the best; the same on all ranks that save."""
        here = self._attempt.lead is not None and self.saver.checkpoints.improves(metrics)
        return bool(self._attempt.world.broadcast(here)) if self._state.sharding else here

    def patience(self) -> float:
        """Seconds that a slow disk may take for this rank's state; the watch for hangs sees no progress meanwhile."""
        return sum(it.nbytes for it in local_rows(self._state.tensors().values())) / SLOWEST

    def take_result(self) -> None:
        """Report the result of the last checkpoint in the background, if there is one; waits for it."""
        if not self.saver.busy:
            return
        step, lead = self.saver.step, self._attempt.lead
        try:
            with activity.during(CHECKPOINT, self.patience()):
                seconds = self.saver.result()
            if self._failures.end():
                log.warning("checkpoints can be written again: step %d is saved", step)
            if lead:
                lead.tracker.event("checkpoint", step, seconds=round(seconds, 4))
                self.announce(step)
        except OSError as error:
            last = known_step(self.saver.checkpoints)
            if lead:
                lead.tracker.event("checkpoint_failed", step, reason=str(error))
            text = f"NO CHECKPOINT at step {step}: {error}; training goes on, the last one is at step {last}"
            if is_full(error):
                folder = near(self.saver.checkpoints.folder)
                text += f"; the disk of {folder} is full: none can be written until you free space"
            self._failures.log(log, text)

    def on_saved(self, step: int) -> None:
        """Rank 0 has a complete checkpoint: on a node without rank 0, delete snapshots of earlier attempts, and store
        compiled code."""
        if not self._attempt.lead:
            self.saver.checkpoints.clear_snapshots(before=step)
            if self._attempt.compiled:
                self._attempt.compiled.pack()

    def pack_compiled(self, asked: bool) -> None:
        """On rank 0: store compiled code with the run, if some is new or `asked`."""
        lead, new = self._attempt.lead, compilation.progress.times != self._compilations
        if not (lead and self._attempt.compiled and (new or asked)):
            return
        with activity.during(CHECKPOINT):
            self._attempt.compiled.pack()
        if new:
            self._compilations = compilation.progress.times
            lead.tracker.event("compile", self._state.step, **compilation.progress.report())

    def digest_is_due(self) -> bool:
        """Whether --digest-every wants one of this step."""
        every, state = self._attempt.config.digest_every, self._state
        return bool(every) and (state.step % every == 0 or state.is_over())

    def record_digests(self) -> None:
        """For --digest-every: the digests of this step, if it is one of these or the last. On all ranks that save."""
        lead, state = self._attempt.lead, self._state
        if self.digest_is_due():
            with activity.during(CHECKPOINT):
                found = digests(state.tensors())
                if lead:
                    samples = samples_digest(self._sampler, state.step)
                    lead.tracker.digest(state.step, options=self._options, samples=samples, digests=found)

    def _record_saved(self, step: int) -> None:
        """In the saver's thread: record that the run can continue from this step."""
        assert self._attempt.lead
        directory = self._attempt.lead.directory
        directory.try_update(step=step, seconds=directory.seconds)  # if that fails, the checkpoint is complete still

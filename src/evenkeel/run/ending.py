"""How a run ends, and what becomes of the last finished step. Without a keeper, or memory, "memory" is the disk.

end                              saved by       to              status     code     next (`Keeper._handle_end`)
finished                         main           disk, model.pt  finished   0        the end, unless a rank has died
stop signal                      rescue         disk            stopped    75       the end
torchrun's, for a failed rank    rescue         disk            failed     75       torchrun decides
REGROUP: another rank has died   rescue         memory          stopped    75       in place
a collective raised for that     main           memory          failed     1        in place, if confirmed
hang                             rescue         memory          failed     1        in place, if within reach
error, NaN, out of memory        main           disk            failed     1        torchrun decides (`exits`)
`Unfit`: its bits may be wrong   -              nowhere         failed     1        torchrun decides
killed                           other ranks    memory          as before  -signal  in place
--grace is over                  as far as it got               as before  as above as above; a hang: torchrun decides
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..common import keeper_link
from ..common.errors import FAILED, Ended, EndedForGood, Refusal, Unfit
from ..common.files import is_full, write_atomically, write_json
from ..common.memory import is_out_of_memory
from ..common.phases import CHECKPOINT, activity
from ..common.processes import is_plain_torchrun
from ..distributed.causes import cause_of, failure_behind, is_loss_of_a_rank
from ..resilience.diagnosis import Diagnosis
from ..resilience.hang import Watch
from ..resilience.interruption import REGROUPING, STOPPED
from ..training.oom import OutOfMemory, explained
from ..training.state import State
from ..training.state_dicts import cpu_state_dict, sha256
from . import crash_loop
from .attempt import Attempt
from .blame import name_samples, say_hints
from .checkpoint import known_step
from .checkpointer import Checkpointer
from .records import read_facts
from .run_directory import RunDirectory, RunState, mark_failed
from .state_files import clean, dump
from .step_log import StepLog
from .summary import report_finished, summary_of

log = logging.getLogger(__name__)


class Ending:
    """Ends a run on every rank. Only :meth:`finish` needs the others; rank 0 records the end."""

    def __init__(self, attempt: Attempt, state: State, checkpointer: Checkpointer, step_log: StepLog) -> None:
        self._attempt, self._state, self._world = attempt, state, attempt.world
        self._checkpointer, self._saver, self._step_log = checkpointer, checkpointer.saver, step_log
        self.watch: Watch | None = None
        """The watch for hangs, once there is one."""

    def finish(self, metrics: dict[str, float]) -> None:
        """Write the last checkpoint, for which all ranks wait, then model.pt for other programs, and summary.json.

        Args:
            metrics: the last evaluation.

        Raises:
            Ended: they cannot be written.
            NonFinite: the last step was not finite.
        """
        attempt, state, lead = self._attempt, self._state, self._attempt.lead
        state.settle()
        self._step_log.finish()
        self._checkpointer.pack_compiled(asked=True)
        if attempt.compiled and self._world.local_rank == 0:
            attempt.compiled.clear()
        weights = state.sharding.gathered(state.best_model.state_dict(), attempt.path) if state.sharding else {}
        if lead or state.sharding:
            self._checkpointer.take_result()
            self._checkpointer.record_digests()
        if metrics and lead:
            lead.tracker.evaluation(state.step, metrics)
        try:
            self._save_last(metrics)
            if not lead:
                return
            early_reason = ""
            if state.step < attempt.plan.total_steps:
                early_reason = f"stopped early at step {state.step}: {state.stopping.why()}"
            weights = weights or cpu_state_dict(state.best_model)
            spent = self._write_result(lead.directory, metrics, early_reason, weights)
        except OSError as error:
            # without room another attempt would only train this again
            kind = EndedForGood if is_full(error) else Ended
            raise kind(
                f"not finished: step {state.step} cannot be written: {error}; the last checkpoint is at step "
                f"{known_step(self._saver.checkpoints)}; free space and run the same command again"
            ) from error
        if self.watch:
            self.watch.end()  # the other ranks have left, and W&B may keep this one for long
        report_finished(attempt, lead.tracker, state.step, metrics, spent, early_reason)

    def _save_last(self, metrics: dict[str, float]) -> None:
        """Write the last checkpoint: rank 0, and in a sharded run every rank its rows. All ranks stay until rank 0 has
        written, because if it dies, another one has to save the step."""
        activity.enter(CHECKPOINT, patience=self._checkpointer.patience())
        try:
            if self._attempt.lead or self._state.sharding:
                self._saver.save_last(self._state, metrics)
        finally:  # also on a full disk, which the others would take for the loss of a rank
            activity.enter(CHECKPOINT, "of rank 0")
            self._world.broadcast(None)

    def _write_result(
        self, directory: RunDirectory, metrics: dict[str, float], early_reason: str, weights: dict[str, Tensor]
    ) -> dict[str, float]:
        """Write the files of a finished run, with the reason if it stopped early. Returns its ledger."""
        state, path = self._state, self._attempt.path
        directory.update_at_step("running", state.step)
        activity.enter(CHECKPOINT, "model.pt", self._checkpointer.patience())
        with contextlib.suppress(OSError):
            clean(self._saver.checkpoints.folder)  # no start will delete what a killed writer has left there
        write_atomically(path / "model.pt", lambda file: dump(weights, file))
        summary = summary_of(self._attempt, directory, state.step, metrics) | {"weights_sha256": sha256(weights)}
        early = {"stopped_early": bool(early_reason)}
        summary |= early | ({"reason": early_reason} if early_reason else {})
        write_json(path / "summary.json", summary)
        # a run that stopped early has no more steps, whatever the plan says
        directory.update_at_step("finished", state.step, total_steps=state.step, reason=early_reason, **early)
        return dict(summary["ledger"])

    def stopped(self, why: Callable[[], str]) -> None:
        """Save the last finished step after a stop signal, or to start again in place. Any thread may call it."""
        if self._attempt.status.get("state") == "finished":
            return  # all is saved; the same command says so
        rescued = self._saver.rescue(self._state, in_place=why() == REGROUPING)
        if self.watch:
            self.watch.end()
        self._step_log.await_last_line()  # the main thread may be between a commit and its line
        if (reason := why()) == REGROUPING:
            self._record_end("stopped", reason, STOPPED, in_place=True)
            self._attempt.say(f"evenkeel: rank 0 lost another rank; {rescued}; it starts again")
            return
        if cause := failure_behind(reason):
            self._record_end("failed", cause, FAILED)
            then = "a restart or the same command continues there"
            self._attempt.say(f"evenkeel: torchrun stops rank 0, as another rank failed; {rescued}; {then}")
            return
        self._record_end("stopped", reason, STOPPED, **crash_loop.CLEARED)
        plain = is_plain_torchrun(keeper_link.starter())
        more = " (torchrun may print a traceback; that is not an error)" if plain else ""
        restart = "a restart or " if reason == "SIGTERM" else ""  # also torchrun's, if a rank of another node failed
        then = f"{restart}the same command continues there{more}"
        self._attempt.say(f"evenkeel: stopped by {reason}; {rescued}; {then}")

    def failed(self, error: BaseException) -> None:
        """Save the last finished step after an error here or on another rank.

        Args:
            error: what ended the training. The death of another rank shows as an error of a collective.

        Raises:
            OutOfMemory: if memory has run out: the same error, with an explanation.
        """
        out_of_memory = is_out_of_memory(error)
        lost = keeper_link.has_keeper() and not out_of_memory and is_loss_of_a_rank(error)  # then the keeper reports
        if isinstance(error, Ended | Refusal):
            log.info("failed at step %d: %s", self._state.step, error)  # printed to the user in a line of its own
        else:
            log.info("failed at step %d", self._state.step, exc_info=error)  # `exit_code` prints the traceback
        unfit = isinstance(error, Unfit)
        saved = "this rank saves nothing" if unfit else self._saver.rescue(self._state, in_place=lost)
        if samples := name_samples(error, self._attempt, self._state):
            log.info("%s", samples)
        shown = error
        if out_of_memory:  # after the save: nvidia-smi may take long
            shown = OutOfMemory(explained(error, self._world.device, self._attempt.config))
        self._record_failure(shown, saved, lost, "rank 0 lost another rank" if lost else "failed")
        if out_of_memory:
            raise OutOfMemory(f"{shown}; {saved}") from error

    def hung(self) -> None:
        """Save the last finished step, report which rank is stuck, and kill frozen ranks for torchrun, in this order:
        save; explain; tell the keeper; kill; log and record."""
        assert self.watch
        diagnosis = Diagnosis(self.watch)  # in another thread, so that explaining the hang cannot delay the save
        # first: --grace may end this process at any time. If no restart in place follows, the keeper writes it to disk
        saved = self._saver.rescue(self._state, in_place=keeper_link.has_keeper())
        explanation = diagnosis.explain()  # before the kill: what waits for a frozen rank is over with it
        if diagnosis.is_within_reach():  # a frozen rank that stays would be waited for by those that start in place
            keeper_link.send("hang", diagnosis.findings.hung)
        diagnosis.kill_frozen()  # before log and record, whose file system may hang; torchrun waits for these ranks
        log.info("failed at step %d: %s", self._state.step, explanation)
        activity.write_off()  # before the record, which has the seconds of each phase
        blamed, status = diagnosis.findings.blamed, self._attempt.path / "status.json"
        if diagnosis.is_lowest and self._world.rank != 0:  # rank 0 is frozen, so this one records the end
            with contextlib.suppress(OSError):  # the file system may be the cause
                known, run_id = read_facts(status)[0], self._attempt.provenance.run_id
                if (known.get("state"), known.get("run_id")) == ("running", run_id):
                    mark_failed(status, explanation, wrong_nodes=_wrong_nodes(known, blamed))
        wrong_nodes = _wrong_nodes(self._attempt.status, blamed)
        self._record_failure(Ended(explanation), saved, what="ended because of a hang", wrong_nodes=wrong_nodes)
        diagnosis.write_collectives()  # after all that matters: torch may hang in NCCL's
        diagnosis.compare_collectives()  # of the files that all ranks have just written

    @property
    def _step(self) -> int:
        """The step reached; as recorded, if this attempt has not loaded it yet. Right on rank 0 only."""
        return self._state.step or int(self._attempt.status.get("step", 0))

    def _record_failure(
        self, error: BaseException, saved: str, lost: bool = False, what: str = "failed", **facts: Any
    ) -> None:
        self._record_end("failed", cause_of(error), FAILED, lost, **facts)
        if self._step:  # before the first step there is nothing to save, and the cause comes next
            self._attempt.say(f"evenkeel: {what} at step {self._step}; {saved}")
        if samples := say_hints(error, self._attempt, self._state):
            with contextlib.suppress(OSError):
                mark_failed(self._attempt.path / "status.json", f"{cause_of(error)}; {samples}")

    def _record_end(self, name: RunState, reason: str, exit_code: int, in_place: bool = False, **facts: Any) -> None:
        lead = self._attempt.lead
        if not lead or lead.directory.status.get("state") == "finished":
            return  # a signal after the end has no effect
        with contextlib.suppress(OSError):  # a disk too full even for this
            lead.directory.update_at_step(name, self._step, reason=reason, **facts)
        lead.tracker.event({"stopped": "stop", "failed": "failure"}[name], self._step, reason=reason)
        lead.tracker.close(exit_code, in_place)


def _wrong_nodes(status: Mapping[str, Any], blamed: Sequence[str]) -> dict[str, int]:
    """How often which node was wrong, with the hang that these are blamed for."""
    return dict(Counter(status.get("wrong_nodes", {})) + Counter(blamed))

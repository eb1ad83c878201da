"""The line of metrics of a step, and warnings: steps left out, late ranks, hints."""

from __future__ import annotations

import logging
import time

from torch import Tensor

from ..common.naming import TRAIN, in_set
from ..training.arrivals import Arrivals
from ..training.balance import Balance
from ..training.distributed_loss import DistributedLoss
from ..training.flops import per_sample
from ..training.loss import LossFunction
from ..training.memory_parts import PEAK, bytes_of_state, peak
from ..training.side_effects import warn_of_missing, warn_of_sums
from ..training.state import State
from ..training.task import Task
from ..training.whole_batch import has_batch_loss
from .attempt import Attempt
from .blame import replay_command
from .hints import hints, measure
from .stragglers import Stragglers

log = logging.getLogger(__name__)

MANY_OVERFLOWS = 10
"""Consecutive steps that float16's loss scaling may leave out without a warning: the first scale is a guess."""

LAST_LINE_SECONDS = 0.5
"""Seconds that a stop waits for the line of metrics of the last step, which usually takes a millisecond."""


class StepLog:
    """Reports steps: every rank measures, rank 0 writes. The task gives the number of tokens in a batch."""

    def __init__(self, attempt: Attempt, task: Task, state: State) -> None:
        self._attempt, self._task, self._state = attempt, task, state
        self.arrivals = Arrivals(attempt.world)
        """When this rank is ready for the reductions; the steps mark it."""
        self.losses: list[LossFunction] = []
        """Those of the job, which is not always the task's alone."""
        self.balance = Balance(attempt.config, attempt.plan, attempt.world)
        """How many micro-batches each rank computes."""
        ranks = attempt.path / "ranks.jsonl"
        self._stragglers = Stragglers(ranks, attempt.hosts, attempt.config.shares) if attempt.lead else None
        text = self._shares_text() if attempt.config.shares != "equal" else ""
        if attempt.lead and attempt.status.get("shares", "") != text:
            attempt.lead.directory.try_update(shares=text)
        self._logged, self._skipped_logged, self._overflows_logged, self._warned_of_missing = 0, 0, (0, 0), False

    def after_step(self, model: DistributedLoss, norm: Tensor) -> None:
        """Log the last step of this model, with this norm of its gradient, and divide the next ones, if it is time."""
        step = self._state.step
        if step % self._attempt.config.log_every == 0:
            self._log(model, norm)
        if self.balance.decide(step):
            self._report_shares(step)

    def _log(self, model: DistributedLoss, norm: Tensor) -> None:
        """Reads from the device, so not every step is logged. The loss is asked for only here: it may cost an
        exchange."""
        state = self._state
        self._take_arrivals(self.arrivals.exchange(state.step))
        loss = model.loss
        if not self._attempt.lead:
            return
        tracker = self._attempt.lead.tracker
        if state.skipped > self._skipped_logged:
            number, self._skipped_logged = state.last_skipped, state.skipped
            look = f"; to see where it begins: {it}" if (it := replay_command(self._attempt, number)) else ""
            log.warning("step %d was not finite and was left out, %d in this attempt%s", number, state.skipped, look)
            tracker.event("nonfinite", number, skipped=state.skipped)
        more = {name: float(rate) for name, rate in state.rates.items()}
        if state.scaler:  # of the next step, and how many the run has left out for it
            more |= {"scale": state.scaler.scale.item(), "overflows": int(state.scaler.overflows)}
            self._report_overflows(state.step, int(more["overflows"]))
        self._warned_of_missing = self._warned_of_missing or warn_of_missing(*model.last_micro_batch)
        if tracker.per_sample is None:
            config, world, last = self._attempt.config, self._attempt.world, model.last_micro_batch
            usual = self.losses == [self._task.loss]  # with others, or networks that take turns, the factors differ
            tracker.per_sample = per_sample(self._task, state.model, *last, config, world) if usual else {}
            exchanges = self._task.collectives or config.sync_batchnorm or state.sharding
            if usual and not exchanges and state.step == config.log_every and not has_batch_loss(self._task):
                warn_of_sums("loss", self._task, world.device, last[1], state.model, last[0])
        parts = {in_set(TRAIN, name): part.item() for name, part in model.parts.items()}
        tracker.train(state.step, loss.item(), norm.item(), more.pop("lr"), more, parts)
        self._logged = state.step
        self._report_hints()

    def report_memory(self) -> None:
        """Record how many bytes each part of the state takes on each rank, and the peak so far. All ranks call this."""
        attempt, state = self._attempt, self._state
        mine = bytes_of_state(state.names, state.optimizers, bool(state.average))
        everywhere = attempt.world.all_gather(mine | {PEAK: peak(attempt.world.devices)})
        if attempt.lead:
            attempt.lead.tracker.event("memory", state.step, memory=everywhere)

    def finish(self) -> None:
        """Take the arrivals of the last steps."""
        self._take_arrivals(self.arrivals.last())

    def await_last_line(self) -> None:
        """For a stop between the commit of the last step and its line of metrics: wait for the line."""
        step, deadline = self._state.step, time.monotonic() + LAST_LINE_SECONDS
        due = self._attempt.lead is not None and step % self._attempt.config.log_every == 0
        while due and self._logged < step and time.monotonic() < deadline:
            time.sleep(0.005)

    def _take_arrivals(self, found: tuple[int, list[list[float]]] | None) -> None:
        if found and self._stragglers:
            self._stragglers.take(*found)
            self.balance.take(found[1])

    def _report_shares(self, step: int) -> None:
        attempt, text = self._attempt, self._shares_text()
        if attempt.lead:
            reason = f"the ranks now compute {text} micro-batches of each step"
            attempt.lead.directory.try_update(shares=text)
            attempt.say(f"step {step}: {reason}")
            attempt.lead.tracker.event("shares", step, shares=list(self.balance.per_rank), reason=reason)

    def _shares_text(self) -> str:
        return ":".join(map(str, self.balance.per_rank))

    def _report_hints(self) -> None:
        """Log a hint when it is new in this run, and store the present ones in status.json."""
        attempt = self._attempt
        if not (attempt.lead and self._stragglers):
            return
        known = attempt.status.get("hints", {})
        now = hints(measure(attempt.config, attempt.plan, attempt.world))
        for subject in now.keys() - known.keys():
            attempt.say(f"hint: {now[subject]}")
        now |= {f"rank {rank}": text for rank, text in self._stragglers.named.items()}
        if {subject for subject, text in known.items() if text} != now.keys():
            attempt.lead.directory.try_update(hints={**dict.fromkeys(known, ""), **now})

    def _report_overflows(self, step: int, overflows: int) -> None:
        """Some overflows are normal while the scale is found; if all steps overflow, nothing is learned."""
        known, overflows_then = self._overflows_logged
        all_of_them = overflows - overflows_then == step - known
        if all_of_them and step - known < MANY_OVERFLOWS:
            return
        self._overflows_logged = (step, overflows)
        if all_of_them:
            log.warning(
                "the gradient overflowed in all of the last %d steps, which were left out: lower --lr or "
                "--loss-scale, or use --precision bf16", step - known,
            )  # fmt: skip

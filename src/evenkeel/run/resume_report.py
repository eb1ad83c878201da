"""What rank 0 logs when a run continues, or begins: from where, with which model, and which bits may differ."""

from __future__ import annotations

import logging

from ..common import keeper_link
from ..common.arguments import flag
from ..common.phases import activity
from ..config import Config
from ..training.freezing import left_evaluating, left_out, unregistered
from ..training.state import State
from .fingerprint import MICRO_BATCH, OURS, UNSET, Differences, cut_in_words, describe, read_cut
from .records import TAIL, evaluation_in, read_records
from .resume import Resumed
from .run_directory import RunDirectory
from .tracking import Tracker

log = logging.getLogger(__name__)


def report(resumed: Resumed, config: Config, state: State, directory: RunDirectory, tracker: Tracker) -> None:
    """Log on rank 0 from where the run continues, and start the tracker."""
    _report_model(config, state)
    if keeper_link.has_keeper() and config.keeper_memory == "on":
        _report_memory(state)
    if state.step < (reached := directory.status.get("step", 0)):
        log.warning("the run had reached step %d, but its newest checkpoint is of step %d", reached, state.step)
    if resumed.other_best:
        log.warning("%s, from step %d on: the best and --patience start anew", resumed.other_best, state.step)
    records = list(read_records(directory.path / "metrics.jsonl", tail=TAIL))
    activity.redo_until = max((record["step"] for record in records), default=0)
    tracker.start(state.step, evaluation_in(records, state.step))
    _report_bits(config, resumed.other_bits, state.step, tracker)


def _report_model(config: Config, state: State) -> None:
    """Log where the model is and has its weights from, and warn of likely mistakes in it."""
    if state.placed:
        log.info("%s", state.placed)
    likely = left_out(state.names, state.optimizers), left_evaluating(state.model), unregistered(state.model)
    for line in filter(None, likely):
        log.warning("%s", line)
    if state.origin and state.step == 0:
        # weights that stayed random are worth a warning
        log.log(logging.WARNING if config.init_partial else logging.INFO, "%s", state.origin)


def _report_memory(state: State) -> None:
    size = sum(tensor.nbytes for tensor in state.tensors().values()) / 1e6
    more = "" if state.step else " and the optimizers' state"
    stores = "each rank stores its part of two steps of" if state.sharding else "if a rank dies, each other keeps"
    log.info("%s %.1f MB%s in memory for the restart (--keeper-memory)", stores, size, more)


def _report_bits(config: Config, others: Differences, step: int, tracker: Tracker) -> None:
    """Warn of what voids bit-for-bit equality from here on."""
    if MICRO_BATCH in others:
        before, now = others[MICRO_BATCH]
        log.warning(
            "from step %d on a step is cut into %s, before into %s: each batch has the same samples, but dropout, "
            "mixing, BatchNorm's groups and the last bits change; if that matters, add %s, the cut before",
            step, cut_in_words(now), cut_in_words(before), flag("{} {}".format(*read_cut(before))),
        )  # fmt: skip
    files = [name for name, change in others.items() if name.startswith("code:") and UNSET not in change]
    if own := [name.removeprefix("code:") for name in files if not name.startswith(OURS)]:
        names = ", ".join(own)
        log.warning("%s has changed; from step %d on the run has the new code (--fresh: all of it)", names, step)
    if others:
        # with the ring the bits also depend on the number of ranks, and are not promised
        level = logging.WARNING if config.reduce == "tree" or "strategy" in others else logging.INFO
        log.log(level, "from step %d on bit-for-bit equality is void: %s", step, describe(others))
        tracker.event("bits", step, differences=others)

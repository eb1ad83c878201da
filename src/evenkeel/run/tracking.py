"""What a run reports, with a verb for each way. `say`: a line on the screen. `Tracker.event`: a line of metrics.jsonl.
`Tracker.send`: metrics in other places (`trackers`). `log`: a line of the rank's log; rank 0's warnings also on stderr.

Only rank 0 reports, except for the logs. `metrics.jsonl` is append-only: after a stop without a checkpoint some steps
are done again and appear twice; a "start" record between them has the step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from ..common import display, keeper_link
from ..common.arguments import lose_stdout
from ..common.errors import Ended
from ..common.files import append_json
from ..common.naming import TRAIN, count_ranks, eta, figures, named, progress, rates, shown, time_spent
from ..common.phases import START_UP, activity
from ..common.repeats import Repeats
from ..config import Config
from ..data.plan import Plan
from ..distributed.world import World
from ..resilience import interruption
from .chain import chained
from .records import LINE_SECONDS, attempt_ends, goodput, goodput_to_show, ledger, read_records
from .trackers import FAILED, FINISHED, STOPPED, MetricsTracker, WandB, in_the_folder, wandb_mode

log = logging.getLogger(__name__)

LOG_TIMEOUT = 1.0
"""Seconds that a thread which logs waits for the disk."""

_failures = Repeats()  # of the output


def start_logs(folder: Path, world: World) -> None:
    """Send this rank's log records to ``folder/rank-R.log``, and rank 0's warnings to stderr as well."""
    folder.mkdir(parents=True, exist_ok=True)
    package = logging.getLogger("evenkeel")
    package.setLevel(logging.INFO)
    file = _LogFile(folder / f"rank-{world.rank}.log")
    file.setFormatter(logging.Formatter(f"%(asctime)s rank {world.rank} %(levelname)s %(name)s: %(message)s"))
    for old in package.handlers:
        old.close()
    package.handlers[:] = [file]
    if world.rank == 0:
        stderr = logging.StreamHandler()
        stderr.setLevel(logging.WARNING)
        stderr.setFormatter(display.Lines("evenkeel: %(levelname)s: %(message)s"))
        package.addHandler(stderr)


def say(text: str) -> None:
    """Print a line on stdout. The training goes on if that has no reader any more, or its disk is full."""
    try:
        display.say(text)
    except BrokenPipeError:
        lose_stdout()  # the reader may close (`| head`, a terminal)
        log.info("the output has no reader any more; metrics.jsonl continues")
    except OSError as error:
        _failures.log(log, f"the output: {error}")


class _LogFile(logging.FileHandler):
    """A log file whose disk may hang, or be full: stderr has the warnings.

    A thread of its own writes. A thread that logs waits until its line is there, so that none is missing after
    `os._exit`, but not for ever: a rescue has more to do, and a rank without a heartbeat would be killed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._lines = SimpleQueue[tuple[str, threading.Event] | None]()
        self._owner_pid = os.getpid()  # whose thread writes; 0: closed
        self._last = threading.Event()  # the last line is written
        self._last.set()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Log a line; wait a second at most, and not at all if the one before is not there yet."""
        if os.getpid() != self._owner_pid:
            if self._owner_pid:  # a loader process, which is a fork without that thread
                super().emit(record)
            return
        try:
            line = self.format(record) + self.terminator
        except Exception:
            self.handleError(record)
            return
        before, self._last = self._last, threading.Event()
        self._lines.put((line, self._last))
        if before.is_set():
            self._last.wait(LOG_TIMEOUT)

    def _write(self) -> None:
        while item := self._lines.get():
            line, written = item
            with contextlib.suppress(OSError, ValueError):  # full, or closed
                if stream := self.stream:
                    stream.write(line)
                    stream.flush()
            written.set()

    def flush(self) -> None:
        """Wait for the last line, a second at most: a flush beside a write that hangs would hang too."""
        if self._last.wait(LOG_TIMEOUT):
            super().flush()

    def close(self) -> None:
        """End the thread, and close the file unless the thread still waits for its disk."""
        self._lines.put(None)
        self._owner_pid = 0
        with contextlib.suppress(OSError):  # full
            if self._last.wait(LOG_TIMEOUT):
                super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Tracker:
    """Reports one attempt on rank 0; ``attempt`` counts the starts of the run, including this one."""

    def __init__(self, config: Config, plan: Plan, run_dir: Path, attempt: int, world_size: int) -> None:
        self.config, self.plan, self.path = config, plan, run_dir
        self.attempt, self.world_size = attempt, world_size
        self.metrics: dict[str, float] = {}
        self._losses: dict[str, float] = {}
        self._chain: str | None = None  # of the last record of digests; None: not read yet
        self.per_sample: dict[str, float] | None = None
        """Factors from samples/s to other figures (`training.flops`); None: not computed yet."""
        self._ends: list[dict[str, Any]] = []  # of attempts so far, which the goodput needs
        self.own_trackers: dict[str, Callable[[int], MetricsTracker]] = {}
        """What makes the trackers of --tracker, by name, from the attempt's first step."""
        self._trackers: dict[str, MetricsTracker] = {}
        self._mark = (time.perf_counter(), 0, 0.0)
        self._evaluated: tuple[int, Mapping[str, float]] = -1, {}
        self._last_line = -math.inf  # when the last line of training was printed
        self._display = display.active
        self._failures = Repeats()

    def start_wandb(self, run_id: str | None, options: dict[str, Any]) -> None:
        """Open the run's only W&B run, by the stored id. An error in it never ends the training."""
        mode, why = wandb_mode(self.config.wandb)
        if mode == "disabled":
            log.info("Weights & Biases is off: %s", why or "as asked")  # not printed: who has no key may not want it
            return
        activity.enter(START_UP, "Weights & Biases")
        try:
            self._trackers["Weights & Biases"] = WandB(self.config, self.path, mode, run_id, options)
        except Exception as error:  # whatever it is
            log.warning("Weights & Biases is off: %s: %s", type(error).__name__, error)

    def start(self, step: int, evaluated: Mapping[str, float] = MappingProxyType({})) -> None:
        """Start at a step; `evaluated`: what an earlier attempt has recorded of its evaluation."""
        self._evaluated = step if evaluated else -1, evaluated
        for name, make in (in_the_folder(self.config, self.path) | self.own_trackers).items():
            activity.enter(START_UP, name)
            try:
                self._trackers[name] = make(step)
            except Exception as error:
                log.warning("%s is off: %s", name, _described(error))
        self._mark = (time.perf_counter(), step, activity.spent().get("data", 0.0))
        last = {"last_end": end} if (end := os.environ.get(keeper_link.LAST_END)) else {}
        self.event("start", step, attempt=self.attempt, world_size=self.world_size, **last)
        self._ends = attempt_ends(self.path / "metrics.jsonl")
        attempt = f"attempt {self.attempt}, " if self.attempt > 1 else ""
        place = display.near(self.path)
        why = f", because {end}" if end else ""
        say(f"{attempt}{count_ranks(self.world_size)}, step {step}/{self.plan.total_steps} -> {place}{why}")
        if self._display:
            self._display.begin(self.plan)

    def train(
        self,
        step: int,
        loss: float,
        norm: float,
        lr: float,
        more: dict[str, float] | None = None,
        parts: dict[str, float] | None = None,
    ) -> None:
        """Report a step: its loss, the gradient's norm, the speed since the last report, and more.

        ``parts`` of the loss, by their full names, are shown as well.
        """
        now, spent, (then, step_then, waited) = time.perf_counter(), activity.spent(), self._mark
        self._mark = (now, step, spent.get("data", 0.0))
        seconds, seen = max(now - then, 1e-9), self.plan.samples_seen
        speed = (seen(step) - seen(step_then)) / seconds
        left = (self.plan.total_steps - step) * seconds / max(1, step - step_then)
        facts = {"loss": loss, "grad_norm": norm, "lr": lr, "samples_per_s": round(speed, 1)}
        facts |= (more or {}) | (parts or {})
        facts["data_wait"] = round(min(1.0, (self._mark[2] - waited) / seconds), 4)
        facts |= {name: round(factor * speed, 4) for name, factor in (self.per_sample or {}).items()}
        epoch = {"epoch": round(step / self.plan.steps_per_epoch, 4)} if self.plan.has_epochs else {}
        values = epoch | named(TRAIN, facts)
        self.event("train", step, **values)
        self.send(step, values)

        self._losses = {f"{TRAIN}/loss": loss, **(parts or {})}
        spent_so_far = ledger([*self._ends, {"kind": "train", "time": time.time(), "spent": spent}])
        productive = goodput_to_show(goodput(spent_so_far), sum(spent_so_far.values()), self.attempt)
        if self._display:
            self._display.metrics = self._latest()
            # the display computes speed and remaining time itself
            self._display.more = rates(values | {f"{TRAIN}/samples_per_s": None}) + time_spent(values, productive)
        elif now - self._last_line >= LINE_SECONDS or step == self.plan.total_steps:
            self._last_line = now
            words = self.plan.epoch_label(step), *self._latest(), *rates(values), eta(left)
            say(progress(step, self.plan.total_steps, *words, *time_spent(values, productive)))

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation, by full names of metrics."""
        self.metrics = metrics
        if (step, metrics) != self._evaluated:
            self.event("eval", step, **metrics)
        if step != self._evaluated[0]:
            self.send(step, metrics)
        if self._display:
            self._display.metrics = self._latest()
        say(progress(step, self.plan.total_steps, shown(metrics)))

    def digest(self, step: int, **facts: Any) -> None:
        """Append a record to the ledger, chained to the one before it, unless an earlier attempt has recorded the step
        from which this one goes on."""
        path = self.path / "metrics.jsonl"
        if self._chain is None:
            self._chain, recorded = "", 0
            for record in read_records(path):
                if "chain" in record:
                    self._chain, recorded = record["chain"], record["step"]
                elif record["kind"] == "start":  # later steps are done again
                    recorded = min(recorded, record["step"])
            if recorded == step:
                return
        loss = self._losses.get(f"{TRAIN}/loss", math.nan) if self._mark[1] == step else math.nan
        facts |= {"loss": loss if math.isfinite(loss) else None}
        chain = chained(self._chain, {"step": step, **facts})
        if self.event("digest", step, **facts, chain=chain):
            self._chain = chain

    def event(self, kind: str, step: int, **facts: Any) -> bool:
        """Append a line to metrics.jsonl. Returns whether it was written."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)} | facts | {"spent": activity.spent()}
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            append_json(self.path / "metrics.jsonl", record)
        except OSError as error:  # a full disk costs a line, not the training
            self._failures.log(log, f"metrics.jsonl: {error}; training goes on without its lines")
            return False
        return True

    def close(self, exit_code: int = 0, in_place: bool = False) -> None:
        """End the display and the trackers; ``in_place``: ranks start again in place."""
        status = {0: FINISHED, interruption.STOPPED: STOPPED}.get(exit_code, FAILED)
        if self._display:
            self._display.stop("restarting" if in_place else status)
        self._each(lambda tracker: tracker.close(status))
        self._trackers = {}

    def _latest(self) -> list[str]:
        return figures(self._losses | {name: it for name, it in self.metrics.items() if not name.endswith("/loss")})

    def send(self, step: int, metrics: Mapping[str, float | Path]) -> None:
        """Log a step's metrics in all trackers, by full names: numbers, and files with pictures and tables."""
        self._each(lambda tracker: tracker.log(metrics, step))

    def _each(self, do: Callable[[MetricsTracker], None]) -> None:
        """Do something with each tracker; one that fails is off from there on."""
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # wandb's process may have been killed, the disk may be full
                del self._trackers[name]
                log.warning("%s is off from here on: %s", name, _described(error))


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, Ended) else f"{type(error).__name__}: {error}"

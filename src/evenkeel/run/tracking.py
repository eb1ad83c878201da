"""What a run reports: a live display, metrics.jsonl, Weights & Biases, and a log for each rank.

All but the logs are rank 0's. `metrics.jsonl` is append-only: after a stop without a checkpoint some steps are done
again and appear twice; a "start" record between them says from which step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import netrc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ..common import display
from ..common.arguments import lose_stdout
from ..common.naming import TRAIN, named, shown
from ..common.phases import START_UP, activity
from ..config import Config
from ..data.plan import Plan
from ..distributed.world import World
from ..resilience.interruption import STOPPED

log = logging.getLogger(__name__)

INIT_TIMEOUT = 20.0
"""Seconds that wandb may wait for its server (and it takes 10 more to give up); WANDB_INIT_TIMEOUT overrides it."""


def start_logs(folder: Path, world: World) -> None:
    """Send this rank's log records to ``folder/rank-R.log``, and rank 0's warnings to stderr as well."""
    folder.mkdir(parents=True, exist_ok=True)
    package = logging.getLogger("evenkeel")
    package.setLevel(logging.INFO)
    file = _LogFile(folder / f"rank-{world.rank}.log", encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter(f"%(asctime)s rank {world.rank} %(levelname)s %(name)s: %(message)s"))
    package.handlers[:] = [file]
    if world.rank == 0:
        stderr = logging.StreamHandler()
        stderr.setLevel(logging.WARNING)
        stderr.setFormatter(logging.Formatter("evenkeel: %(levelname)s: %(message)s"))
        package.addHandler(stderr)


class _LogFile(logging.FileHandler):
    """A log file that loses records to a full disk without a traceback for each; stderr has what matters."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Tracker:
    """What rank 0 reports of one attempt; ``attempt`` counts the starts of the run, this one included."""

    def __init__(self, config: Config, plan: Plan, run_dir: Path, attempt: int, world_size: int) -> None:
        self.config, self.plan, self.path = config, plan, run_dir
        self.attempt, self.world_size = attempt, world_size
        self.metrics: dict[str, float] = {}
        self._losses: dict[str, float] = {}
        self._wandb: Any = None
        self._mark = (time.perf_counter(), 0)
        self._display = display.shown

    def start_wandb(self, run_id: str | None, options: dict[str, Any]) -> None:
        """Open the run's one W&B run, by the id that the run has kept. Trouble with it never ends the training."""
        mode, why = wandb_mode(self.config.wandb)
        if mode == "disabled":
            self.say(f"Weights & Biases is off{': ' if why else ''}{why}")
            return
        activity.enter(START_UP, "Weights & Biases")
        typed = sys.argv
        try:
            import wandb

            sys.argv = typed[:1]  # wandb would send all of it, secrets too; the other options are in its config
            self._wandb = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "evenkeel"),
                name=os.environ.get("WANDB_NAME", self.path.name),
                id=run_id,
                resume="allow" if mode == "online" else None,  # offline has nothing to ask, and would warn
                mode=mode,
                settings=wandb.Settings(init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT))),
                dir=self.path,
                config=options,
            )
        except Exception as error:  # whatever it is
            log.warning("Weights & Biases is off: %s: %s", type(error).__name__, error)
        finally:
            sys.argv = typed

    def start(self, step: int) -> None:
        """The attempt begins at a step."""
        self._mark = (time.perf_counter(), step)
        self.event("start", step, attempt=self.attempt, world_size=self.world_size)
        attempt = f"attempt {self.attempt}, " if self.attempt > 1 else ""
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        self.say(f"{attempt}{ranks}, step {step}/{self.plan.total_steps} -> {self.path}")
        if self._display:
            self._display.begin(self.plan)

    def train(self, step: int, loss: float, norm: float, lr: float, more: dict[str, float] | None = None) -> None:
        """Report a step: its loss, the gradient's norm, the speed since the last report, and what else there is."""
        now, (then, step_then) = time.perf_counter(), self._mark
        self._mark = (now, step)
        seconds, seen = max(now - then, 1e-9), self.plan.samples_seen
        speed = (seen(step) - seen(step_then)) / seconds
        left = timedelta(seconds=round((self.plan.total_steps - step) * seconds / max(1, step - step_then)))
        facts = {"loss": loss, "grad_norm": norm, "lr": lr, "samples_per_s": round(speed, 1)} | (more or {})
        values = {"epoch": round(step / self.plan.steps_per_epoch, 4)} | named(TRAIN, facts)
        self.event("train", step, **values)
        self._to_wandb("log", values, step=step)

        self._losses = {f"{TRAIN}/loss": loss}
        if self._display:
            self._display.told = self._latest()
        else:
            epoch, _ = self.plan.locate(step - 1)
            text = f"epoch {epoch + 1}/{self.plan.epochs}  {self._latest()}  {speed:,.0f} samples/s  ETA {left}"
            self.say(f"step {step}/{self.plan.total_steps}  {text}")

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation, by full names of metrics."""
        self.metrics = metrics
        self.event("eval", step, **metrics)
        self._to_wandb("log", metrics, step=step)
        if self._display:
            self._display.told = self._latest()
        self.say(f"step {step}/{self.plan.total_steps}  {shown(metrics)}")

    def event(self, kind: str, step: int, **facts: Any) -> None:
        """Append a line to metrics.jsonl."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3)} | facts | {"spent": activity.spent()}
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            with (self.path / "metrics.jsonl").open("ab", buffering=0) as file:
                end = file.tell()
                line = f"{json.dumps(record)}\n".encode()
                if file.write(line) < len(line):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk costs a line, not the training
            log.error("metrics.jsonl: %s", error)

    def say(self, text: str) -> None:
        """Print a line for the reader."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            lose_stdout()  # the reader may go (`| head`, a closed terminal) without an end to the training
            log.info("nobody reads the output any more; metrics.jsonl goes on")
        except OSError as error:  # a file on a full disk
            log.error("the output: %s", error)

    def close(self, exit_code: int = 0) -> None:
        """End the display and the W&B run."""
        if self._display:
            self._display.stop({0: "finished", STOPPED: "stopped"}.get(exit_code, "failed"))
        self._to_wandb("finish", exit_code=exit_code)
        self._wandb = None

    def _latest(self) -> str:
        return shown(self._losses | {name: value for name, value in self.metrics.items() if not name.endswith("/loss")})

    def _to_wandb(self, method: str, *what: Any, **more: Any) -> None:
        try:
            if self._wandb:
                getattr(self._wandb, method)(*what, **more)
        except Exception as error:  # its process may have been killed
            self._wandb = None
            log.warning("Weights & Biases is off from here on: %s: %s", type(error).__name__, error)


def wandb_mode(asked: str) -> tuple[Any, str]:
    """What --wandb means on this machine: online, offline or disabled, and the reason if `auto` turned it off."""
    if asked != "auto":
        return asked, ""
    if mode := os.environ.get("WANDB_MODE"):
        return mode, ""
    # look where wandb looks, without its import of a second and without ever holding the key
    found = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    path = next((path for name in names if (path := Path(name).expanduser()).exists()), None)
    with contextlib.suppress(OSError, UnicodeDecodeError, netrc.NetrcParseError):
        found = found or (path is not None and netrc.netrc(path).authenticators(host) is not None)
    if found:
        return "online", ""
    return "disabled", "no key found; run `wandb login` or set WANDB_API_KEY, or use --wandb offline"

"""What a run tells: a live display, metrics.jsonl, Weights & Biases, and a log for each rank.

All but the logs are rank 0's. `metrics.jsonl` is append-only: after a stop without a checkpoint some steps are
done again and stand there twice; a "start" record between them says from which step.
"""

from __future__ import annotations

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

from . import display
from .activity import START_UP, activity
from .config import Config
from .errors import lose_stdout
from .interruption import STOPPED
from .naming import TEST, TRAIN, named, shown
from .plan import Plan
from .world import World

log = logging.getLogger(__name__)

INIT_TIMEOUT = 20.0
"""Seconds that wandb may wait for its server (and it takes 10 more to give up); WANDB_INIT_TIMEOUT overrides it."""


def start_logs(folder: Path, world: World) -> None:
    """Send this rank's log records to ``folder/rank-R.log``, and rank 0's warnings to stderr as well."""
    folder.mkdir(parents=True, exist_ok=True)
    form = logging.Formatter(f"%(asctime)s rank {world.rank} %(levelname)s %(name)s: %(message)s")
    handlers: list[logging.Handler] = [_LogFile(folder / f"rank-{world.rank}.log")]
    if world.rank == 0:
        stderr = logging.StreamHandler()
        stderr.setLevel(logging.WARNING)
        stderr.setFormatter(logging.Formatter("evenkeel: %(levelname)s: %(message)s"))
        handlers.append(stderr)
    handlers[0].setFormatter(form)
    package = logging.getLogger("evenkeel")
    package.handlers[:] = handlers
    package.setLevel(logging.INFO)


class _LogFile(logging.FileHandler):
    """A log file that loses records to a full disk without a traceback for each; stderr has what matters.

    A name that is not in UTF-8 is written with escapes, as on stderr.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class Tracker:
    """What rank 0 tells.

    Args:
        config: for the log interval and Weights & Biases.
        plan: length of the run.
        run_dir: where metrics.jsonl is.
        attempt: starts of the run so far, this one included.
        world_size: ranks of this attempt.
    """

    def __init__(self, config: Config, plan: Plan, run_dir: Path, attempt: int, world_size: int) -> None:
        self.config, self.plan, self.path = config, plan, run_dir
        self.attempt, self.world_size = attempt, world_size
        self.metrics: dict[str, float] = {}
        self._losses: dict[str, float] = {}
        self._wandb: Any = None
        self._mark = (time.perf_counter(), 0)
        self._display = display.shown

    def start_wandb(self, run_id: str | None, options: dict[str, Any]) -> None:
        """Open the run's one W&B run, by the id that the run has kept. Trouble with it never ends a training."""
        mode, why = wandb_mode(self.config.wandb)
        if mode == "disabled":
            self.say(f"Weights & Biases is off{': ' if why else ''}{why}")
            return
        activity.enter(START_UP, "Weights & Biases")
        typed = sys.argv
        try:
            import wandb

            sys.argv = typed[:1]  # wandb would send it as it is; the options that are no secrets are in the config
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
        """A line for a step: its loss, the gradient's norm, the speed since the last line, and what else there is."""
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
        """The result of an evaluation, by full names."""
        self.metrics = metrics
        self.event("eval", step, **metrics)
        self._to_wandb("log", metrics, step=step)
        if self._display:
            self._display.told = self._latest()
        self.say(f"step {step}/{self.plan.total_steps}  {shown(metrics)}")

    def event(self, kind: str, step: int, **facts: Any) -> None:
        """A line in metrics.jsonl."""
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
        """A line for the reader."""
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
        return shown(self._losses | {name: value for name, value in self.metrics.items() if name != f"{TEST}/loss"})

    def _to_wandb(self, method: str, *what: Any, **more: Any) -> None:
        try:
            if self._wandb:
                getattr(self._wandb, method)(*what, **more)
        except Exception as error:  # its process may have been killed
            self._wandb = None
            log.warning("Weights & Biases is off from here on: %s: %s", type(error).__name__, error)


def wandb_mode(asked: str) -> tuple[Any, str]:
    """What --wandb comes to on this machine: (online, offline or disabled; why it is off by itself)."""
    if asked != "auto":
        return asked, ""
    if mode := os.environ.get("WANDB_MODE"):
        return mode, ""
    if _wandb_key_exists():
        return "online", ""
    return "disabled", "no key found; run `wandb login` or set WANDB_API_KEY, or use --wandb offline"


def _wandb_key_exists() -> bool:
    """Look where wandb looks, without its import of a second and without ever holding the key."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    usual = [path for name in ("~/.netrc", "~/_netrc") if (path := Path(name).expanduser()).exists()]
    try:
        path = Path(os.environ["NETRC"]).expanduser() if os.environ.get("NETRC") else usual[0]
        return netrc.netrc(path).authenticators(host) is not None
    except (IndexError, OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return False

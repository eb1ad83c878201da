"""One training over all its starts, as rank 0 keeps it: run directory, checkpoints, what is told.

Every rank has a `Run` and calls the same methods, so that `train.py` need not ask who it is; on other ranks they
take part in the collectives and do nothing else.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor

from . import tracking
from .checkpoint import Checkpoints
from .config import Config, saved_options
from .files import write_atomically, write_json
from .interruption import STOPPED, Stopped
from .optimization import rate
from .plan import Plan
from .run_directory import RunDirectory, RunState, claim, launch_token
from .state import State, cpu_state_dict, sha256
from .tasks import Task
from .world import World

log = logging.getLogger(__name__)


class Run:
    """A run's folder and what is written into it.

    Raises:
        Refusal: on rank 0, if the run directory cannot be this run's.
    """

    def __init__(self, config: Config, task: Task, plan: Plan, world: World) -> None:
        assert config.run_dir is not None  # resolved
        self.path = config.run_dir
        self.config, self.plan, self.world = config, plan, world
        self.options = saved_options(config, task.options())
        self.directory = claim(self.path, self.options, config.fresh) if world.rank == 0 else None
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.keep, task.best)
        self.tracker: tracking.Tracker | None = None
        self.started = time.monotonic()
        self.seconds_before = self.directory.status.get("seconds", 0.0) if self.directory else 0.0

    def begin(self) -> bool:
        """Record, on every rank, that an attempt starts; True if the run was finished before."""
        tokens = self.world.gather(launch_token())
        news: tuple[bool, int] | None = None
        if self.directory:
            if self.config.fresh:
                self.directory.start_over(tokens)
            status = self.directory.status
            finished = status.get("state") == "finished" and status["step"] >= self.plan.total_steps
            if not finished:
                self.directory.begin(self.options, tokens)
            news = finished, self.directory.attempts
        finished, attempt = self.world.broadcast(news)
        if finished:
            self._print(f"{self.path}: finished at step {self.plan.total_steps}; --fresh starts over")
            return True
        tracking.start_logs(self.path / "logs" / f"attempt-{attempt:04d}", self.world)
        if self.directory:
            self._start_tracking(self.directory)
        return False

    def resume(self, state: State) -> None:
        """Continue from the newest checkpoint, if there is one. Rank 0 reads, the others receive."""
        saved = self.checkpoints.load_newest() if self.directory else None
        saved = self.world.broadcast_tensors(saved)
        if saved:
            state.restore(saved)
        if self.tracker:
            self.tracker.start(state.step)

    def log_step(self, step: int, loss: Tensor) -> None:
        """A line of metrics for a step. Reads the loss from the device, so not for every step.

        Args:
            step: steps done.
            loss: the step's loss, summed over ranks.
        """
        if self.tracker:
            self.tracker.train(step, loss.item(), rate(self.config, step - 1, self.plan.total_steps) * self.config.lr)

    def checkpoint(self, state: State, metrics: dict[str, float]) -> None:
        """Note an evaluation, and save if it is time or if it was the best so far.

        A checkpoint that cannot be written is reported, loudly, and the training goes on: the old one stays.
        """
        if not (self.directory and self.tracker):
            return
        if metrics:
            self.tracker.evaluation(state.step, metrics)
        every = self.config.checkpoint_every
        if (every and state.step % every == 0) or self.checkpoints.improves(metrics):
            try:
                self._save(state, metrics)
            except OSError as error:
                self.tracker.event("checkpoint_failed", state.step, reason=str(error))
                log.error("NO CHECKPOINT at step %d: %s; training goes on, the last one is at step %d",
                          state.step, error, self.checkpoints.newest_step())  # fmt: skip

    def finish(self, state: State, metrics: dict[str, float]) -> None:
        """The last checkpoint, the model for the world outside, and the summary."""
        if not (self.directory and self.tracker):
            return
        self.tracker.evaluation(state.step, metrics)
        self._save(state, metrics)
        weights = cpu_state_dict(state.model)
        write_atomically(self.path / "model.pt", lambda file: torch.save(weights, file))
        summary = self._summary("finished", state.step, metrics) | {"weights_sha256": sha256(weights)}
        write_json(self.path / "summary.json", summary)
        self._update("finished", state.step)
        self.tracker.event("finish", state.step)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._print(f"finished in {summary['seconds']:.1f} s: {shown}  -> {self.path / 'model.pt'}")
        self.tracker.close()

    def interrupted(self, state: State, signal_name: str, error: BaseException) -> int:
        """Keep what can be kept when the training did not come to its end.

        Data parallelism leaves a whole copy of the state on rank 0 even if another rank has died in mid-step.

        Args:
            state: the live state.
            signal_name: the signal that asked for a stop, if one did.
            error: what ended the training.

        Returns:
            The exit code of a stop that was asked for.

        Raises:
            BaseException: ``error``, if nobody asked.
        """
        asked = isinstance(error, Stopped) or bool(signal_name)
        if not asked:
            log.error("failed at step %d", state.step, exc_info=error)
        if self.directory and self.tracker:
            if state.whole and state.step > self.checkpoints.newest_step():
                self._save(state, {})
            reason = signal_name if asked else f"{type(error).__name__}: {error}".split("\n")[0]
            self._update("stopped" if asked else "failed", state.step, reason=reason)
            self.tracker.event("stop" if asked else "failure", state.step, reason=reason)
            self.tracker.close(exit_code=STOPPED if asked else 1)
            saved = self.checkpoints.newest_step()
            self._print(f"stopped by {reason}, saved at step {saved}; the same command continues") if asked else None
        if asked:
            return STOPPED
        raise error

    def _start_tracking(self, directory: RunDirectory) -> None:
        config, plan, world = self.config, self.plan, self.world
        if world.world_size > plan.max_world_size:
            log.warning(
                "%d of %d ranks have nothing to do: the batch of %d is cut into %d micro-batches of %d; "
                "a smaller --micro-batch feeds more ranks",
                world.world_size - plan.max_world_size, world.world_size,
                config.batch_size, plan.max_world_size, config.micro_batch,
            )  # fmt: skip
        self.tracker = tracking.Tracker(config, plan, self.path, directory.attempts, world.world_size)
        if wandb_id := self.tracker.start_wandb(directory.status.get("wandb_id"), self.options):
            directory.update("running", wandb_id=wandb_id)

    def _save(self, state: State, metrics: dict[str, float]) -> None:
        assert self.tracker
        begun = time.perf_counter()
        path = self.checkpoints.save(state.capture(), metrics)
        self.tracker.event("checkpoint", state.step, path=path.name, seconds=round(time.perf_counter() - begun, 4))
        self._update("running", state.step)

    def _update(self, name: RunState, step: int, **facts: Any) -> None:
        assert self.directory
        self.directory.update(
            name, step=step, total_steps=self.plan.total_steps, seconds=round(self._seconds(), 3), **facts
        )

    def _seconds(self) -> float:
        """Wall-clock seconds at work, over all attempts that lived to tell."""
        return self.seconds_before + time.monotonic() - self.started

    def _summary(self, name: RunState, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        assert self.directory
        return {
            "state": name,
            "step": step,
            "epoch": step / self.plan.steps_per_epoch,
            "samples_seen": self.plan.samples_seen(step),
            "metrics": metrics,
            "restarts": self.directory.attempts - 1,
            "world_sizes": self.directory.status["world_sizes"],
            "seconds": round(self._seconds(), 3),
        }

    def _print(self, text: str) -> None:
        if self.directory:
            print(f"evenkeel: {text}", flush=True)

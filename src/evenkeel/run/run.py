"""One run across all restarts; rank 0 owns its files.

Every rank has a `Run` and calls the same methods, so `train.py` need not ask which rank it is: on other ranks they take
part in the collectives and do nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.utils.data import DataLoader

from ..common import display, kept
from ..common.errors import FAILED, Ended, Refusal, no_exit
from ..common.files import write_atomically, write_json
from ..common.memory import is_out_of_memory, keep_freed_memory
from ..common.naming import TRAIN, VALIDATION, in_set, shown
from ..common.phases import CHECKPOINT, LONGEST, START_UP, activity
from ..common.processes import ends_with_traceback
from ..config import Config, devices_per_rank, profile_window, validate
from ..data.changes import Changes
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.loader import loader, start_workers
from ..data.plan import Plan
from ..data.sampler import ElasticSampler, Step, by_step
from ..distributed.exits import is_loss_of_a_rank
from ..distributed.world import World
from ..resilience.hang import Watch
from ..resilience.interruption import REGROUPING, STOPPED, Interruption
from ..training import compilation
from ..training.arrivals import Arrivals
from ..training.batch_size_finder import Probe
from ..training.cut import has_batchnorm, refuse_single_samples, settle
from ..training.determinism import fix_arithmetic, operations_named, threads_of_a_rank
from ..training.distributed_loss import DistributedLoss, LossFunction
from ..training.evaluation import Evaluation
from ..training.flops import per_sample
from ..training.oom import OutOfMemory, explained
from ..training.prediction import predictions
from ..training.state import State, cpu_state_dict, sha256
from ..training.task import Classification, Task, evaluation_sets, training_set
from .attempt import Attempt
from .build import build_model, build_state
from .checkpoint import Damaged, dump, read_manifest, step_of
from .digest import digests
from .eval_only import evaluate_only
from .hints import hints, measure
from .predictions import save_predictions
from .records import goodput, ledger, read_records, recorded_options
from .run_directory import RunState
from .saver import Saver
from .stragglers import Stragglers

log = logging.getLogger(__name__)

MANY_OVERFLOWS = 10
"""Steps in a row that float16's loss scaling may leave out without a warning: the first scale is a guess."""

POWERS_OF_FOUR = frozenset(4**power for power in range(32))

LAST_LINE_SECONDS = 0.5
"""How long a stop waits for the line of metrics of the last step. It takes a millisecond, where it comes at all."""


class Run:
    """A run at work: its steps, and what is saved and told after them. Made by :meth:`open`.

    >>> with Run.open(*parse(["--run-dir", folder, "--max-steps", "2", "--wandb", "disabled"])) as run:
    ...     model = run.distribute()
    ...     for step in run.steps():
    ...         for batch in model.micro_batches(step):
    ...             model.backward(model(batch))
    ...         model.step()
    ...         run.after_step(model)
    Weights & Biases is off
    1 rank, step 0/2 -> ...
    step 2/2  test/loss ...
    evenkeel: finished in ...

    Attributes:
        config: the options, the cut of steps included.
        task: what is trained.
        plan: how steps are cut into micro-batches.
        world: who takes part.
        state: model, optimizers and step.
        finished: nothing is left to do.
    """

    def __init__(self, attempt: Attempt, task: Task, state: State, workers: DataLoader[Any] | None = None) -> None:
        self.attempt, self.task, self.state, self.world = attempt, task, state, attempt.world
        self.config, self.plan, self.path = attempt.config, attempt.plan, attempt.path
        self.directory, self.tracker, self.compiled = attempt.directory, attempt.tracker, attempt.compiled
        self.finished, self._workers = False, workers
        self.saver = Saver(
            attempt.checkpoints,
            self.world.devices,
            self.config.grace,
            lambda step: self._update("running", step),
            memory=self.config.keeper_memory == "on",
        )
        self.arrivals = Arrivals(self.world)
        self._stragglers = Stragglers(self.path / "ranks.jsonl", attempt.hosts) if self.tracker else None
        self._metrics: dict[str, float] = {}
        self._changes: Changes | None = Changes(self.config, attempt.sets, attempt.digests)
        self._steps_here = 0
        self._skipped_told = 0
        self._overflows_told = (0, 0)
        self._logged = 0
        self._models = 0  # that `distribute` has made; one with a loss of its own counts as two
        self._compilations = -1
        self._watch: Watch | None = None
        self.seconds_before = self.directory.status.get("seconds", 0.0) if self.directory else 0.0

    @classmethod
    @contextmanager
    def open(cls, config: Config, task: Task) -> Iterator[Run]:
        """Begin a run or continue it: devices, data, model; then the process group and the newest checkpoint.

        Whatever ends the block, the last finished step is saved.

        Raises:
            Refusal: bad input, before the process group exists and before anything is written.
            Ended: the run cannot go on.
        """
        config = config.resolved()  # it may not come from `parse`
        interruption = Interruption(config.grace)  # takes the signals from here on
        with no_exit():
            recorded = {} if config.fresh else recorded_options(config.run_dir)  # another node may know better
            world, sets = prepare(config, task, recorded)
            activity.enter(START_UP, "model")
            model = build_model(config, task)
            cutter = partial(settle, config, world.world_size, partial(has_batchnorm, model))
            settled = cutter(recorded)
            plan = Plan.of(settled, len(sets[TRAINING]))
            if (window := profile_window(config)) and window.start >= plan.total_steps:
                raise Refusal(f"--profile {config.profile}: the run has only {plan.total_steps} steps")
            state = build_state(settled, task, world, plan, model, sets)
            # the last that may refuse; nothing has been written so far
            attempt = Attempt(config, task, plan, world, sets, cutter)

            # a collective's time-out explains nothing, so the watch for hangs must be earlier
            longest = max(600, config.hang_timeout) + LONGEST * config.compile
            with world.connected(timedelta(seconds=longest + 300)) as store:
                finished = attempt.begin(Probe(config, task, world, sets[TRAINING], state))
                workers = 0 if finished else config.num_workers
                run = cls(attempt, task, state, start_workers(sets[TRAINING], config.seed, workers, world.device))
                run.finished = finished
                if finished:
                    yield run
                    return
                interruption.rescue_with(run.stopped)
                attempt.resume(state)
                with run.watched(store, interruption):
                    try:
                        with operations_named(), no_exit():
                            yield run
                            if not state.is_over():
                                raise Ended(
                                    f"the training loop ended at step {state.step} of {attempt.plan.total_steps}"
                                )
                            run.finish()
                    except BaseException as error:
                        interruption.await_end()  # after a signal other ranks leave, which is no failure
                        run.failed(error)
                        raise

    def watched(self, store: Store | None, interruption: Interruption) -> Watch:
        """A context in which every rank tells the others what it does, so that one that hangs is named.

        Args:
            store: this attempt's own.
            interruption: ends this process if a rank hangs.
        """

        def on_hang() -> None:
            interruption.end("a hang", self.hung, FAILED)

        self._watch = Watch(
            self.config.hang_timeout, self.world, store, self.attempt.logs, on_hang, self._checkpoint_elsewhere
        )
        return self._watch

    def distribute(self, loss: LossFunction | None = None, network: nn.Module | None = None) -> DistributedLoss:
        """The model with a loss, for all ranks; see `DistributedLoss`.

        Args:
            loss: (model, batch) -> the batch's mean loss; default: the task's.
            network: the part of the model that learns from this loss; default: all of it.

        Raises:
            Refusal: the cut leaves single samples, and the loss is not the task's, which was tried before the start.
        """
        config, own = self.config, loss not in (None, self.task.loss)
        self._models += 1 + own
        if loss and own:
            train_set = self.attempt.sets[TRAINING]
            refuse_single_samples(config, loss, self.state.model, self.plan, self.world, train_set)
        return DistributedLoss(
            loss or self.task.loss, self.state, self.world, self.plan, config.seed, config.reduce, config.precision,
            config.strategy, self.task.unused_parameters, network, self.arrivals, self.task.collectives,
        )  # fmt: skip

    def steps(self) -> Iterator[Step]:
        """The steps that are left, each with this rank's micro-batches: every sample once an epoch.

        Call :meth:`after_step` at the end of each.
        """
        if self.finished:
            return iter(())
        config, state, plan = self.config, self.state, self.plan
        evaluated = dict(self.attempt.sets)
        train_set = evaluated.pop(TRAINING)
        sampler = ElasticSampler(
            train_set,
            config.batch_size,
            plan.micro_batch,
            num_replicas=self.world.world_size,
            rank=self.world.rank,
            seed=config.seed,
            micro_batches=plan.number,
        )
        batches = loader(train_set, sampler, "train", config.num_workers, self.world.device, self._workers)
        self._evaluations = {
            name: Evaluation(self.task, state.best_model, dataset, config, self.world, name)
            for name, dataset in evaluated.items()
        }
        if state.step == 0:  # what is wrong with metrics should not show after an epoch, or at the end
            compute = [self.task.predict] if self.config.save_predictions else []
            rehearsed, *_ = [evaluation.rehearse(*compute) for evaluation in self._evaluations.values()]
            if rehearsed is not None:
                state.check(rehearsed)
        if state.owes_evaluation or (self.attempt.unevaluated and state.due_for_evaluation):
            self._evaluate_and_save()
        steps = self._steps(batches, sampler)  # a generator of its own: it would change a StopIteration of the above
        return self._profiled(steps) if config.profile else steps

    def _profiled(self, steps: Iterator[Step]) -> Iterator[Step]:
        from .profiling import Profiler  # imports the profiler

        window = profile_window(self.config)
        if self.state.step >= window.stop:
            self._print(
                f"--profile {self.config.profile}: nothing to trace, the run is at step {self.state.step} already"
            )
        return Profiler(window, self.config.memory_snapshot, self.world, self.path).around(steps, self.state)

    def _steps(self, batches: DataLoader[Any], sampler: ElasticSampler) -> Iterator[Step]:
        while not self.state.is_over():
            epoch, first_step = self.plan.locate(self.state.step)
            sampler.set_epoch(epoch, first_step)
            for step in by_step(batches, sampler):
                yield step
                if self.state.is_over():
                    break

    def after_step(self, model: DistributedLoss, norm: Tensor | None = None) -> None:
        """Log, evaluate and save, as far as it is time for each.

        Args:
            model: that has taken the step. Its loss is asked for only to log it, as that may cost an exchange.
            norm: the gradient's; None: as `model.step` had it.
        """
        state = self.state
        self._steps_here += 1
        if self._steps_here == 1:
            kept.tell("progress", str(state.step))
        # after 1, 4, 16, 64, ... steps of this attempt, so that what it costs goes to nothing, and at the end
        if state.is_over() or self._steps_here in POWERS_OF_FOUR:
            self._check_data()
        if self.directory and self.directory.fruitless:
            self.directory.note(fruitless=0)  # this attempt has finished a step
        if state.step % self.config.log_every == 0:
            self._note_arrivals(self.arrivals.exchange(state.step))
            self._log_step(model, model.norm if norm is None else norm)
        if state.due_for_evaluation:
            self._evaluate_and_save()
        else:
            self._metrics = {}
            if not state.is_over():
                self.checkpoint({})

    def _check_data(self) -> None:
        """End the run on all ranks if its data has changed since the attempt began; with --other-data warn, once."""
        if not self._changes:
            return
        with activity.during(CHECKPOINT):
            everywhere = self.world.gather((self._changes(), self.config.other_data))
        if not (changed := next(filter(None, (line for line, _ in everywhere)), "")):
            return
        if not any(accepted for _, accepted in everywhere):
            raise Ended(
                f"{changed}: its result then depends on the ranks and on --num-workers, and a stop loses the change; "
                "make the data before the job, and begin another one with other data (--init-from), or, if you accept "
                "that, add --other-data"
            )
        self._changes = None
        log.warning("--other-data: %s", changed)

    def _evaluate_and_save(self) -> None:
        """Evaluate on the set that decides and then, now or at the end only, on the others."""
        first, *others = self._evaluations.values()
        self._metrics = first.named(self.state.note(first()))
        if first.name != VALIDATION or self.state.is_over():
            for other in others:
                self._metrics |= other.named(other())
        if not self.state.is_over():
            self.checkpoint(self._metrics)
        elif self.config.save_predictions:
            for evaluation in self._evaluations.values():
                rows = predictions(evaluation)
                if self.directory:
                    save_predictions(self.path / "predictions", self.state.step, evaluation, rows)

    def _log_step(self, model: DistributedLoss, norm: Tensor) -> None:
        """A line of metrics for the last step. Reads from the device, so not for every step."""
        state, loss = self.state, model.loss
        if not self.tracker:
            return
        if state.skipped > self._skipped_told:
            self._skipped_told = state.skipped
            log.warning("step %d was not finite and is left out, %d in this attempt", state.last_skipped, state.skipped)
            self.tracker.event("nonfinite", state.last_skipped, skipped=state.skipped)
        more = {name: float(rate) for name, rate in state.rates.items()}
        if state.scaler:  # of the next step, and how many the run has left out for it
            more |= {"scale": state.scaler.scale.item(), "overflows": int(state.scaler.overflows)}
            self._tell_overflows(state.step, int(more["overflows"]))
        if self.tracker.per_sample is None:
            # another loss, or networks that take turns, cost something else
            self.tracker.per_sample = (
                per_sample(self.task, state.model, *model.last_micro_batch, self.config, self.world)
                if self._models == 1
                else {}
            )
        parts = {in_set(TRAIN, name): part.item() for name, part in model.parts.items()}
        self.tracker.train(state.step, loss.item(), norm.item(), more.pop("lr"), more, parts)
        self._logged = state.step
        self._tell_hints()

    def _tell_hints(self) -> None:
        """Say a hint when it is new in this run, and keep in status.json those of now."""
        if not (self.directory and self.tracker and self._stragglers):
            return
        told, now = self.directory.status.get("hints", {}), hints(measure(self.config, self.plan, self.world))
        for subject in now.keys() - told.keys():
            self.tracker.say(f"hint: {now[subject]}")
        now |= {f"rank {rank}": text for rank, text in self._stragglers.named.items()}
        if {subject for subject, text in told.items() if text} != now.keys():
            self.directory.note(hints={**dict.fromkeys(told, ""), **now})

    def _note_arrivals(self, found: tuple[int, list[list[float]]] | None) -> None:
        if found and self._stragglers:
            self._stragglers.take(*found)

    def _tell_overflows(self, step: int, overflows: int) -> None:
        """Some overflows are part of finding the scale; where there is nothing else, nothing is learned."""
        known, overflows_then = self._overflows_told
        all_of_them = overflows - overflows_then == step - known
        if all_of_them and step - known < MANY_OVERFLOWS:
            return
        self._overflows_told = (step, overflows)
        if all_of_them:
            log.warning(
                "the gradient has overflowed in all of the last %d steps, and they are left out: lower --lr or "
                "--loss-scale, or use --precision bf16",
                step - known,
            )

    def checkpoint(self, metrics: dict[str, float]) -> None:
        """Tell of an evaluation, and save if it is time or if it was the best so far.

        After each step but the last, and after an evaluation that a resumed run has made up for. A checkpoint that
        cannot be written is reported with the next step, and training goes on: the old one stays.
        """
        state, saver = self.state, self.saver
        if not (self.directory and self.tracker):
            return
        saver.pin(state)
        self._record_digests()
        every = self.config.checkpoint_every
        due = bool(every) and state.step % every == 0
        self._pack_compiled(due)
        if saver.done or (saver.busy and (due or metrics)):
            with activity.during(CHECKPOINT):
                self._take_result()
        if metrics:
            self.tracker.evaluation(state.step, metrics)
        if due or (metrics and saver.checkpoints.improves(metrics)):
            saver.start(state, metrics)

    def _take_result(self) -> None:
        """What came of the last checkpoint in the background; waits for it if need be."""
        assert self.tracker
        step = self.saver.step
        try:
            self.tracker.event("checkpoint", step, seconds=round(self.saver.result(), 4))
            if self._watch:
                self._watch.announce_saved(step)
        except OSError as error:
            last = self.saver.checkpoints.newest_step()
            self.tracker.event("checkpoint_failed", step, reason=str(error))
            log.error("NO CHECKPOINT at step %d: %s; training goes on, the last one is at step %d", step, error, last)

    def _checkpoint_elsewhere(self, step: int) -> None:
        """On a node without rank 0, snapshots of former attempts are of no use any more."""
        if not self.directory:
            self.saver.checkpoints.clear_snapshots(before=step)
            if self.compiled:
                self.compiled.pack()

    def _pack_compiled(self, asked: bool) -> None:
        """Keep compiled code with the run, if some is new or it is asked for."""
        new = compilation.progress.times != self._compilations
        if not (self.compiled and (new or asked)):
            return
        with activity.during(CHECKPOINT):
            self.compiled.pack()
        if new and self.tracker:
            self._compilations = compilation.progress.times
            self.tracker.event("compile", self.state.step, **compilation.progress.report())

    def _record_digests(self) -> None:
        every = self.config.digest_every
        if self.tracker and every and (self.state.step % every == 0 or self.state.is_over()):
            with activity.during(CHECKPOINT):
                self.tracker.event("digest", self.state.step, digests=digests(self.state.tensors()))

    def finish(self) -> None:
        """Write the last checkpoint, model.pt for the world outside, and summary.json.

        Raises:
            Ended: they cannot be written.
            NonFinite: the last step was not finite.
        """
        state = self.state
        state.settle()
        self._note_arrivals(self.arrivals.last())
        if self.directory:
            self._pack_compiled(asked=True)
        if self.compiled and self.world.local_rank == 0:
            self.compiled.clear()
        if not (self.directory and self.tracker):
            return
        if self.saver.busy:
            self._take_result()
        metrics = self._metrics
        self.tracker.evaluation(state.step, metrics)
        self._record_digests()
        activity.enter(CHECKPOINT)
        weights = cpu_state_dict(state.best_model)
        early = state.step < self.plan.total_steps
        why = f"stopped early at step {state.step}: {state.stopping.why()}" * early
        try:
            self.saver.save_last(state, metrics)
            self._update("running", state.step)
            write_atomically(self.path / "model.pt", lambda file: dump(weights, file))
            summary = self._summary(metrics) | {"weights_sha256": sha256(weights)}
            summary |= {"stopped_early": early} | ({"reason": why} if early else {})
            write_json(self.path / "summary.json", summary)
            # such a run has no more steps to do, whatever the plan says
            self._update("finished", state.step, total_steps=state.step, stopped_early=early, reason=why)
        except OSError as error:
            raise Ended(
                f"not finished: step {state.step} cannot be written: {error}; the last checkpoint is at step "
                f"{self.saver.checkpoints.newest_step()}; make room and run the same command again"
            ) from error
        self.tracker.event("finish", state.step)
        dead = summary["ledger"]["dead"]
        seconds = sum(summary["ledger"].values()) - dead
        training = round(100 * summary["ledger"]["productive"] / max(seconds, 1e-9))
        took = f"{seconds:.1f} s ({training} % training, {100 - training} % start-up and other)"
        took += f" and {dead:.0f} s in which it stood still" * (dead >= 1)
        self._print(f"finished in {took}{f', {why}' * early}: {shown(metrics)}  -> {self.path / 'model.pt'}")
        self.tracker.close(best=self._best(metrics))

    def _best(self, metrics: dict[str, float]) -> dict[str, float]:
        """The evaluation of the best checkpoint, or if there is none the last, as trackers show it."""
        step, best = self.state.step, self.saver.checkpoints.best_path()
        with contextlib.suppress(Damaged):
            if best:
                step, metrics = step_of(best), read_manifest(best).metrics
        return {"best/step": step, **{f"best/{name}": value for name, value in metrics.items()}}

    def _summary(self, metrics: dict[str, float]) -> dict[str, Any]:
        assert self.directory
        now = {"kind": "summary", "time": time.time(), "spent": activity.spent()}
        seconds = ledger([*read_records(self.path / "metrics.jsonl"), now])
        return {
            "state": "finished",
            "step": self.state.step,
            "epoch": self.state.step / self.plan.steps_per_epoch,
            "samples_seen": self.plan.samples_seen(self.state.step),
            "metrics": metrics,
            "restarts": self.directory.attempts - 1,
            "restarts_in_place": self.directory.status.get("restarts_in_place", 0),
            "world_sizes": self.directory.status["world_sizes"],
            "bits_void_from": self.saver.checkpoints.bits_void_from,
            "seconds": round(self._seconds(), 3),
            "goodput": goodput(seconds),
            "ledger": seconds,
        }

    def stopped(self, reason: str) -> None:
        """A signal asked for a stop: save the last finished step. Any thread may call it, whatever the others do."""
        going_on = reason == REGROUPING
        saved = self.saver.rescue(self.state, self.world.local_rank, in_place=going_on)
        if self._watch:
            self._watch.end()
        self._await_last_line()
        self._end("stopped", reason, STOPPED, **({} if going_on else {"fruitless": 0}))
        more = "" if going_on else "; the same command continues"
        if more and ends_with_traceback(kept.launcher()):
            more += " (torchrun may end with a traceback, which is no error)"
        self._print(f"stopped by {reason}; {saved}{more}")

    def _await_last_line(self) -> None:
        """The signal may have come between the commit of the last step and its line of metrics, which soon follows."""
        step, deadline = self.state.step, time.monotonic() + LAST_LINE_SECONDS
        due = self.tracker is not None and step % self.config.log_every == 0
        while due and self._logged < step and time.monotonic() < deadline:
            time.sleep(0.005)

    def failed(self, error: BaseException) -> None:
        """Something went wrong here or on another rank: save the last finished step.

        Args:
            error: what ended the training. The death of another rank shows as an error of a collective.

        Raises:
            OutOfMemory: if memory has run out: the same error, with all that there is to say.
        """
        if is_out_of_memory(error):
            saved = self._failed(OutOfMemory(explained(error, self.world.device, self.config)))
            raise OutOfMemory(explained(error, self.world.device, self.config, saved)) from error
        self._failed(error)

    def _failed(self, error: BaseException) -> str:
        lost = kept.is_kept() and is_loss_of_a_rank(error)  # whose keeper tells more
        if isinstance(error, Ended | Refusal):
            log.info("failed at step %d: %s", self.state.step, error)  # the user is told in a line of its own
        else:
            log.log(logging.INFO if lost else logging.ERROR, "failed at step %d", self.state.step, exc_info=error)
        what = "another rank is lost" if lost else "failed"
        return self._end_failed(error, self.saver.rescue(self.state, self.world.local_rank, in_place=lost), what)

    def _end_failed(self, error: BaseException, saved: str, what: str = "failed") -> str:
        self._end("failed", _reason(error), FAILED)
        self._print(f"{what} at step {self.state.step}; {saved}")
        return saved

    def hung(self) -> None:
        """A rank is stuck: save the last finished step, say which rank, and free torchrun of those that cannot end."""
        assert self._watch
        self._watch.look_around()  # meanwhile: nothing that explains the hang may keep the state from being saved
        saved = self.saver.rescue(self.state, self.world.local_rank, in_place=kept.is_kept())
        explanation = self._watch.explain()
        if self._watch.is_within_reach():
            kept.tell("hang")
        log.info("failed at step %d: %s", self.state.step, explanation)
        activity.write_off()
        self._end_failed(Ended(explanation), saved)
        self._watch.kill_frozen()
        self._watch.write_collectives()
        self._watch.compare_collectives()

    def _end(self, name: RunState, reason: str, exit_code: int, **facts: Any) -> None:
        if not (self.directory and self.tracker) or self.directory.status.get("state") == "finished":
            return  # a signal in the very last moment changes nothing any more
        step = self.state.step
        with contextlib.suppress(OSError):  # a disk too full even for this
            self._update(name, step or self.directory.status.get("step", 0), reason=reason, **facts)
        self.tracker.event({"stopped": "stop", "failed": "failure"}[name], step, reason=reason)
        self.tracker.close(exit_code=exit_code)

    def _update(self, name: RunState, step: int, **facts: Any) -> None:
        assert self.directory
        facts = {"total_steps": self.plan.total_steps} | facts
        self.directory.update(name, step=step, seconds=round(self._seconds(), 3), **facts)

    def _seconds(self) -> float:
        """Wall-clock seconds at work, over all attempts that lived to tell."""
        return self.seconds_before + time.monotonic() - self.attempt.started

    def _print(self, text: str) -> None:
        self.attempt.print(text)


def evaluate(config: Config, task: Task) -> int:
    """With --eval-only: print the metrics of a run's newest checkpoint, or of weights in a file. Returns 0.

    >>> evaluate(*parse(["--run-dir", folder, "--eval-only"]))  # after the run of `Run`
    evenkeel: ...
    0

    Raises:
        Refusal: there are no weights, or they do not fit the model.
    """
    Interruption(config.grace)
    with no_exit():
        recorded = {} if config.fresh else recorded_options(config.run_dir)
        world, sets = prepare(config, task, recorded)
        del sets[TRAINING]
        return evaluate_only(config, task, world, sets, partial(build_model, config, task))


def prepare(config: Config, task: Task, recorded: Mapping[str, Any]) -> tuple[World, dict[str, SizedDataset]]:
    """This process's devices, arithmetic and threads, without a process group yet; the training data and that of the
    evaluation, by name.

    Args:
        config: the options.
        task: whose data it is.
        recorded: what the run has settled of the options that were left open.

    Raises:
        Refusal: the environment is not torchrun's, or the options contradict it or the data.
    """
    world = prepare_process(config, recorded)
    activity.enter(START_UP, "data")
    train_set = training_set(task, config)
    validate(config, len(train_set))
    if config.tensorboard and not find_spec("tensorboard"):
        raise Refusal("--tensorboard: needs the package tensorboard; pip install 'evenkeel[tensorboard]'")
    if config.save_predictions and not isinstance(task, Classification):
        raise Refusal(f"--save-predictions: is for tasks derived from Classification, and {type(task).__name__} is not")
    return world, {TRAINING: train_set} | evaluation_sets(task, config)


def prepare_process(config: Config, recorded: Mapping[str, Any]) -> World:
    """This process's devices, arithmetic and threads; raises as :func:`prepare`."""
    kept.tell("limit", str(config.keeper_restarts))
    kept.tell("grace", str(config.grace))
    display.start()
    keep_freed_memory()
    fix_arithmetic(config.exact, config.precision == "tf32")
    world = World.from_environment(devices_per_rank(config), config.strategy, config.share_gpu)
    threads = recorded.get("threads") or threads_of_a_rank(config.exact, world.local_world_size)
    torch.set_num_threads(config.threads or threads)
    if config.memory_snapshot and world.device.type != "cuda":
        raise Refusal(
            "--memory-snapshot: records the memory of GPUs, and this process computes on the CPU; leave it out"
        )
    return world


def _reason(error: BaseException) -> str:
    """What went wrong, in a line."""
    name = "" if isinstance(error, Ended | Refusal) else f"{type(error).__name__}: "
    first, *more = f"{name}{error}".strip().split("\n")
    # of an error in a loader process torch tells where it was caught first, and what it was last
    return more[-1] if more and " in DataLoader worker process " in first else first

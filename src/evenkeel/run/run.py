"""One run across all restarts; rank 0 owns its files.

Every rank has a `Run` and calls the same methods, so `train.py` need not check its rank: on ranks other than 0 they
only take part in the collectives. A `Run` connects its parts, and computes nothing itself:

    open         `build` (devices, data, model, state), `Attempt.begin` (all ranks agree), `resume` (the newest state);
                 around the block `Ending` (the last finished step is saved) and `Watch` (hangs)
    distribute   `DistributedLoss`, the model and its loss on all ranks
    steps        sampler and loader, from the committed step on
    after_step   `StepLog`, `Evaluator`, `Checkpointer`, `Verification`
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.utils.data import DataLoader

from ..common import keeper_link
from ..common.errors import FAILED, EndedHere, Refusal, no_exit
from ..common.naming import TRAIN
from ..common.phases import START_UP, activity
from ..config import Config, profile_window
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.loader import Loader, make_loader, start_workers
from ..data.order import positions_in, token_batches
from ..data.plan import Assignment, Plan
from ..data.sampler import ElasticSampler, Step, by_step
from ..resilience.hang import Watch
from ..resilience.interruption import Interruption
from ..resilience.news import News
from ..training.checks import wrong_step
from ..training.cut import decide_cut, has_batchnorm, refuse_single_samples
from ..training.determinism import operations_named
from ..training.distributed_loss import DistributedLoss
from ..training.loss import LossFunction
from ..training.refresh import Refresh
from ..training.state import State
from ..training.task import Task
from ..training.whole_batch import WholeBatch, has_batch_loss
from . import media
from .attempt import Attempt
from .build import build_model_of_rank, build_state, find_micro_batch, prepare, shard, timeouts, warn_of_full_weights
from .checkpointer import Checkpointer
from .earlier_run import recorded_options
from .ending import Ending
from .evaluator import Evaluator
from .fingerprint import edited
from .resume import resume
from .resume_report import report
from .start_checks import disk_needed, end_if_models_differ
from .step_log import StepLog
from .verification import Verification
from .verified_loss import VerifiedLoss

log = logging.getLogger(__name__)

POWERS_OF_FOUR = frozenset(4**power for power in range(32))
"""Steps of an attempt after which data, the task's state and memory are checked: more and more rarely."""


class Run:
    """An active run: its steps, and what is saved and logged after them. Made by :meth:`open`.

    >>> with Run.open(*parse(["--run-dir", folder, "--max-steps", "2", "--wandb", "disabled"])) as run:
    ...     model = run.distribute()
    ...     for step in run.steps():
    ...         for batch in model.micro_batches(step):
    ...             model.backward(model(batch))
    ...         model.step()
    ...         run.after_step(model)
    1 rank, step 0/2 -> ...
    step 2/2  test/loss ...
    evenkeel: finished in ...

    Attributes:
        config: the options, the cut of steps included.
        task: what is trained.
        plan: how steps are cut into micro-batches.
        world: who takes part.
        state: model, optimizers and step.
        finished: whether the run has no more steps.
    """

    def __init__(
        self, attempt: Attempt, task: Task, state: State, started: Loader | None = None, finished: bool = False
    ) -> None:
        self.attempt, self.task, self.state, self.world = attempt, task, state, attempt.world
        self.config, self.plan, self.path = attempt.config, attempt.plan, attempt.path
        self.finished = finished
        self.asked_to_stop: Callable[[], bool] = lambda: False  # `fit` sets it: Ctrl-C in a notebook
        self.evaluator = Evaluator(attempt, task, state)
        self.checkpointer = Checkpointer(attempt, state)
        self.step_log = StepLog(attempt, task, state)
        self.ending = Ending(attempt, state, self.checkpointer, self.step_log)
        self.verification = Verification(attempt, state, self.checkpointer)
        attempt.data.watch()
        self._started_loader = started
        self._unevaluated = False  # the state that was loaded has no evaluation yet
        self._steps_here = 0  # steps of this attempt

    @classmethod
    @contextmanager
    def open(cls, config: Config, task: Task, interruption: Interruption | None = None) -> Iterator[Run]:
        """Start or continue a run: devices, data, model; then the process group and the newest checkpoint.

        The last finished step is saved, unless a commit fails. `interruption`: what takes signals.

            phase                 a stop signal is followed by      an error is recorded by
            building              the end of the process            nothing
            connected             Attempt.stopped, a record         Attempt.failure_recorded
            finished already      the end of the process            nothing
            resuming, training    Ending.stopped, a rescue          Ending.failed, after a rescue

        Raises:
            Refusal: bad input; on one rank before the process group exists, or on all. `Refusal` says when.
            Ended: the run cannot go on.
        """
        config = config.resolved()  # it may not come from `parse`
        config = replace(config, run_dir=Path(os.path.abspath(config.run_dir or "")))  # noqa: PTH100  (a task may chdir)
        interruption = interruption or Interruption(config.grace)  # handles signals from here on
        with no_exit():
            attempt, state, why_not_meta = _built(config, task)
            world, training_set = attempt.world, attempt.sets[TRAINING]
            interruption.on_stop(attempt.stopped)
            with closing(attempt), world.connected(*timeouts(config, world.world_size, state)) as store:
                with attempt.failure_recorded():
                    finished = attempt.begin(partial(find_micro_batch, config, task, world, training_set, state))
                    end_if_models_differ(world, task, state.model)
                    num_workers = 0 if finished or state.refresh else config.num_workers
                    started = start_workers(training_set, config.seed, num_workers, world.device)
                    run = cls(attempt, task, state, started, finished)
                    shard(state, task, world, config)
                if finished:
                    interruption.on_stop(lambda _why: None)
                    yield run
                    return
                interruption.on_stop(run.ending.stopped)
                with ExitStack() as stack, run._finish_or_rescue(interruption):
                    warn_of_full_weights(state, world, why_not_meta)  # after `begin`, which opens the logs
                    run._resume()
                    # `stack` ends after the rescue: a rank that stops beating while it saves would be killed as frozen
                    stack.enter_context(run._watched(store, interruption))
                    yield run

    @contextmanager
    def _finish_or_rescue(self, interruption: Interruption) -> Iterator[None]:
        """Finish the run at the end of the block; if anything goes wrong in it, save the last finished step."""
        try:
            with operations_named(), no_exit():
                yield
                if not self.state.is_over():
                    reached = f"step {self.state.step} of {self.plan.total_steps}"
                    raise EndedHere(f"the training loop ended at {reached}: it must take all run.steps()")
                self.ending.finish(self.evaluator.metrics)
        except KeyboardInterrupt:  # only in a notebook (`Resident`): else the interruption ends the process
            self.ending.stopped(lambda: "Ctrl-C")
            raise
        except BaseException as error:
            interruption.claim_end_or_block()  # after a signal other ranks leave, which is no failure
            self.ending.failed(error)
            raise

    def _resume(self) -> None:
        """Load the newest complete state of any node, if there is one; raises as `resume`."""
        checkpoints, saver = self.attempt.checkpoints, self.checkpointer.saver
        resumed = resume(self.config, self.world, checkpoints, self.state, saver)
        self._unevaluated = resumed.unevaluated
        if self.attempt.lead:
            if self.config.keep_every:
                self.attempt.say(f"evenkeel: {disk_needed(self.config, self.plan.total_steps, self.state)}")
            report(resumed, self.config, self.state, self.attempt.lead.directory, self.attempt.lead.tracker)
            if keeper_link.restarts() and (names := ", ".join(edited(type(self.task)))):
                log.warning("%s has changed on the disk; the run goes on with the code that it began with", names)

    def _watched(self, store: Store | None, interruption: Interruption) -> Watch:
        """A context in which every rank reports through the attempt's store what it does, so that one that hangs is
        named; then the interruption ends this process."""
        timeout, logs = self.config.hang_timeout, self.attempt.logs
        on_hang = partial(interruption.begin_shutdown, "a hang", self.ending.hung, FAILED)
        news = News(self.world.local_rank, self.checkpointer.on_saved)
        watch = Watch(timeout, self.world, store, logs, on_hang, news)
        self.ending.watch, self.checkpointer.announce = watch, news.announce
        return watch

    def distribute(self, loss: LossFunction | None = None, network: nn.Module | None = None) -> DistributedLoss:
        """The model with a loss, for all ranks; see `DistributedLoss`.

        Args:
            loss: (model, batch) -> the batch's mean loss; default: the task's.
            network: the part of the model that learns from this loss; default: all of it.

        Raises:
            Refusal: the cut leaves single samples, and this loss fails on them (the task's own was tried at the start).
        """
        config, loss = self.config, loss or self.task.loss
        self.step_log.losses.append(loss)
        if loss != self.task.loss:
            train_set = self.attempt.sets[TRAINING]
            refuse_single_samples(config, loss, self.state.model, self.plan, self.world, train_set)
        elif has_batch_loss(self.task):
            loss = WholeBatch(self.task.embed, self.task.batch_loss)
        kind = partial(VerifiedLoss, self.verification) if self.verification.needed else DistributedLoss
        return kind(
            loss, self.state, self.world, self.plan, config, network=network,
            unused_parameters=self.task.unused_parameters, collectives=self.task.collectives,
            arrivals=self.step_log.arrivals, balance=self.step_log.balance,
        )  # fmt: skip

    def steps(self) -> Iterator[Step]:
        """The remaining steps, each with this rank's micro-batches: every position of an epoch's order once.

        Call :meth:`after_step` at the end of each.
        """
        if self.finished:
            return iter(())
        config, state, plan, world = self.config, self.state, self.plan, self.world
        train_set = self.attempt.sets[TRAINING]
        how: Assignment = "round_robin" if state.sharding else "share"
        sampler = ElasticSampler.of_run(plan, train_set, config.seed, world.world_size, world.rank, how)
        batches = self._training_batches(sampler)
        self.evaluator.prepare()
        # ranks may have loaded copies made before and after the evaluation
        if any(world.all_gather(self.evaluator.owed(self._unevaluated))):
            self._evaluate_and_save()
        elif state.step and not state.is_over() and (self.attempt.lead or state.sharding):
            self.checkpointer.record_digests()  # rank 0 may have died between the commit and the record
        # `steps` itself is no generator: in one, a StopIteration of the lines above would become a RuntimeError
        steps = self._steps(batches, sampler)
        if not config.profile:
            return steps
        from .profiling import profiled  # imports torch's profiler

        return profiled(steps, config, state, world, self.path)

    def _training_batches(self, sampler: ElasticSampler) -> DataLoader[Any]:
        if self._started_loader is not None:  # no bool(): its length may be 0
            return self._started_loader.set_sampler(sampler)
        train_set, device = self.attempt.sets[TRAINING], self.world.device
        return make_loader(train_set, sampler, TRAIN, self.config.num_workers, device)

    def _steps(self, batches: DataLoader[Any], sampler: ElasticSampler) -> Iterator[Step]:
        # each turn begins at the committed step: an epoch's first, one that --verify-every repeats, or the first with
        # new shares
        loaded = -1  # the epoch whose refreshed data `batches` has
        while not self.state.is_over():
            epoch, first_step = self.plan.locate(self.state.step)
            self.attempt.record_order(epoch)
            if refresh := self.state.refresh:
                if not first_step and refresh.due(epoch):
                    self.state.keep_weights(refresh, epoch)
                if refresh.epoch != loaded:
                    batches, loaded = self._refreshed(refresh, sampler), refresh.epoch
            sampler.set_epoch(epoch, first_step)
            sampler.per_rank = self.step_log.balance.per_rank
            for step in by_step(batches, sampler):
                if self.asked_to_stop():
                    raise KeyboardInterrupt
                yield step
                again = self.verification.repeats_step  # --verify-every: the step was not committed
                if self.state.step != (step.number if again else step.number + 1):
                    raise wrong_step()
                if again or self.state.is_over() or sampler.per_rank != self.step_log.balance.per_rank:
                    break

    def _refreshed(self, refresh: Refresh, sampler: ElasticSampler) -> DataLoader[Any]:
        """The loader of the data that the task makes from here on; its processes are forked when an epoch begins."""
        dataset = refresh.data(self.attempt.sets[TRAINING], self.state.task_state)
        refresh.digest = self.attempt.data.refreshed(refresh.epoch, dataset, refresh.digest)
        return make_loader(dataset, sampler, TRAIN, self.config.num_workers, self.world.device, ahead=False)

    def after_step(self, model: DistributedLoss, norm: Tensor | None = None) -> None:
        """Log, evaluate and save, if each is due.

        Args:
            model: that has taken the step.
            norm: the gradient's; None: as `model.step` had it.
        """
        state, lead = self.state, self.attempt.lead
        if self.verification.repeats_step:
            return  # --verify-every found a difference: this step was not committed, and is computed again
        self.checkpointer.saver.store_step(state)
        self._steps_here += 1
        if self._steps_here == 1 or self.checkpointer.digest_is_due():
            state.settle()  # a GPU may still undo it, and then it is no progress
        if self._steps_here == 1:
            keeper_link.send("first_step", str(state.step))
        self._check_now_and_then()
        if lead:
            lead.directory.record_progress()
        self.step_log.after_step(model, model.norm if norm is None else norm)
        if state.evaluation_is_due():
            self._evaluate_and_save()
        else:
            self.evaluator.metrics = {}
            if not state.is_over():
                self.checkpointer.after_step({})

    def _check_now_and_then(self) -> None:
        """Do the checks of which some need all ranks, in ever fewer steps."""
        state = self.state
        now_and_then = state.is_over() or self._steps_here in POWERS_OF_FOUR
        if now_and_then:
            self.attempt.data.refuse_changed()
            self.verification.record()
            self.step_log.report_memory()
        if state.task_state and (now_and_then or state.evaluation_is_due() or self.config.saves_at(state.step)):
            state.task_state.compare()

    def log(self, values: Mapping[str, Any]) -> None:
        """Log what the job has to show of the present step, from rank 0; see `media.log`. Not in every step: it reads
        from the device, and writes files."""
        if self.attempt.lead:
            media.log(self.attempt.lead.tracker, self.state.step, values)

    def _evaluate_and_save(self) -> None:
        self.state.settle()  # raises if the step was not finite; the evaluation waits for the device in any case
        with self.state.task_state.unchanged() if self.state.task_state else nullcontext():
            self.evaluator.evaluate()
        if not self.state.is_over():
            self.checkpointer.after_step(self.evaluator.metrics)
        elif self.config.save_predictions:
            self.evaluator.save_predictions()


def _built(config: Config, task: Task) -> tuple[Attempt, State, str]:
    """The attempt and the state before its first step, from this node's records alone. Also why the model's weights are
    not on the meta device; "": they are, or need not be."""
    # this node's copy of the run; `Attempt.begin` compares those of all nodes
    recorded = {} if config.fresh else recorded_options(config.run_dir)
    world, sets = prepare(config, task, recorded)
    activity.enter(START_UP, "model")
    model, why_not_meta = build_model_of_rank(config, task, world)
    # (recorded options) -> options with the cut. `Attempt.begin` calls it again, with the newest of any node
    cutter = partial(decide_cut, config, world.world_size, partial(has_batchnorm, model))
    provisional = cutter(recorded)
    plan = _plan_of(provisional, sets[TRAINING])
    state = build_state(provisional, task, world, plan, model, sets)
    fixed = state.schedulers.options if state.schedulers else frozenset[str]()
    return Attempt(config, task, plan, world, sets, cutter, fixed), state, why_not_meta


def _plan_of(config: Config, train_set: SizedDataset) -> Plan:
    """How the steps of a run are cut; refuses a --profile that begins after the last one."""
    plan = Plan.of(config, positions_in(train_set), token_batches(train_set))
    if (window := profile_window(config)) and window.start >= plan.total_steps:
        raise Refusal(f"--profile {config.profile}: the run has only {plan.total_steps} steps")
    return plan

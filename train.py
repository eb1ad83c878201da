#!/usr/bin/env python3
"""Train a task on one process or many, and continue where the last attempt stopped.

    torchrun --standalone --nproc_per_node=2 train.py
    python train.py --task my_job.py:MyTask --help

Read it from the top: this is the whole job. What is hard to get right is in src/evenkeel, one subject a file.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

from evenkeel import display

if __name__ == "__main__":
    display.announce()  # for the imports below take seconds

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from evenkeel import data, launchers
from evenkeel.activity import START_UP, activity
from evenkeel.allocator import keep_freed_memory
from evenkeel.arithmetic import fix_arithmetic, operations_named, threads_of_a_rank
from evenkeel.checked_optimizers import checked_optimizers
from evenkeel.cli import parse
from evenkeel.compilation import LONGEST as LONGEST_COMPILATION
from evenkeel.compilation import compile_networks, in_place
from evenkeel.config import Config, devices_per_rank, validate
from evenkeel.cut import has_batchnorm, settle
from evenkeel.data import ElasticSampler
from evenkeel.data_digest import look
from evenkeel.errors import FAILED, exit_code, leave, no_exit
from evenkeel.eval_only import evaluate_only
from evenkeel.evaluation import Evaluation
from evenkeel.freezing import freeze
from evenkeel.gradients import Gradients, clip
from evenkeel.interruption import Interruption
from evenkeel.memory import explaining
from evenkeel.mistakes import check_model
from evenkeel.optimization import Rates
from evenkeel.placement import place
from evenkeel.plan import Plan
from evenkeel.precision import Scaler
from evenkeel.probe import Probe
from evenkeel.randomness import seed_task
from evenkeel.records import recorded_options
from evenkeel.run import Run
from evenkeel.single_samples import refuse_single_samples
from evenkeel.state import State
from evenkeel.stopping import Stopping
from evenkeel.sync_batchnorm import synchronise
from evenkeel.tasks import Task
from evenkeel.weights import load_weights
from evenkeel.world import World


@record  # torchrun's closing report then shows the traceback of the rank that failed
@explaining  # where memory runs out
def main() -> int:
    """From the command line to an exit code: 0 finished, 75 stopped and can be continued, 2 refused."""
    if typed := launchers.topology_in(sys.argv[1:]):  # python train.py -n 1 -g 2 -nr 0
        return launchers.main(launchers.MultiNode, typed, Path(__file__).resolve())
    config, task = parse(sys.argv[1:])
    display.start()
    with no_exit():
        return start(config, task)


def start(config: Config, task: Task) -> int:
    """Begin a run or continue it, or evaluate one."""
    interruption = Interruption(config.grace)  # takes the signals from here on
    keep_freed_memory()
    exact = config.deterministic or config.reduce == "tree"
    fix_arithmetic(exact, config.precision == "tf32")
    world = World.from_environment(devices_per_rank(config), config.strategy)
    recorded = {} if config.fresh else recorded_options(config.run_dir)  # another node may know better: Run.begin
    torch.set_num_threads(config.threads or recorded.get("threads") or threads_of_a_rank(exact, world.local_world_size))
    activity.enter(START_UP, "data")
    train_set, test_set = data.of_task(task, config, "train"), data.of_task(task, config, "test")
    validate(config, len(train_set), len(test_set))
    if config.eval_only:
        return evaluate_only(config, task, world, test_set, partial(network, config, task))
    activity.enter(START_UP, "model")
    model = network(config, task)
    cutter = partial(settle, config, world.world_size, partial(has_batchnorm, model))
    settled = cutter(recorded)
    plan = Plan.of(settled, len(train_set))
    state = build(settled, task, world, plan, model)
    # the last that may refuse; nothing has been touched so far
    run = Run(config, task, plan, world, len(test_set), cutter, partial(look, config, train_set, test_set))

    # a collective's time-out explains nothing, so the watch for hangs must be earlier
    longest = max(600, config.hang_timeout) + LONGEST_COMPILATION * config.compile
    with world.connected(timedelta(seconds=longest + 300)) as store:
        if run.begin(Probe(config, task, world, train_set, state)):
            return 0  # it was finished before
        config, plan = run.config, run.plan  # how steps are cut is known only now
        interruption.rescue_with(lambda signal: run.stopped(state, signal))
        run.resume(state)
        with run.watched(store, on_hang=lambda: interruption.end("a hang", lambda: run.hung(state), FAILED)):
            try:
                with operations_named(), no_exit():
                    train(config, task, world, plan, state, run, train_set, test_set)
            except BaseException as error:
                interruption.settle()  # after a signal other ranks leave, which is no failure
                run.failed(state, error)
                raise
    return 0


def network(config: Config, task: Task) -> nn.Module:
    """The model with its first random weights, the same on every rank."""
    seed_task(config.seed, "weights")
    model = task.model()
    check_model(model, learns=not config.eval_only)
    return in_place(model)


def build(config: Config, task: Task, world: World, plan: Plan, model: nn.Module) -> State:
    """Model, optimizers and what else changes with the steps, as before the first one; the same on every rank."""
    origin = load_weights(model, config.init_from, config.init_partial) if config.init_from else ""
    freeze(model, config.freeze)
    refuse_single_samples(config, task, model, plan, world)
    if config.sync_batchnorm:
        synchronise(model, plan, world, config.reduce, task.unused_parameters)
    placed = place(model, config, world.devices)
    if config.compile:
        exact = config.deterministic or config.reduce == "tree"
        compile_networks(model, world.device, exact, whole=config.reduce == "tree")
    scaler = Scaler(world.device, config.loss_scale) if config.precision == "fp16" else None
    stopping = Stopping(plan.total_steps, config.eval_every or plan.steps_per_epoch, task.best, config.patience)
    seed_task(config.seed, "optimizers")
    optimizers = checked_optimizers(task.optimizers(model, config), model)
    return State(model, optimizers, config.on_nonfinite == "skip", origin, scaler, config.ema, stopping, placed)


def train(
    config: Config,
    task: Task,
    world: World,
    plan: Plan,
    state: State,
    run: Run,
    train_set: data.SizedDataset,
    test_set: data.SizedDataset,
) -> None:
    """Step after step until the plan is done, then the final evaluation and the export."""
    # DDP, or DataParallel
    gradients = Gradients(task, state, world, plan, config.seed, config.reduce, config.precision, config.strategy)
    sampler = ElasticSampler(
        train_set,
        config.batch_size,
        plan.micro_batch,
        num_replicas=world.world_size,
        rank=world.rank,
        seed=config.seed,
        micro_batches=plan.number,
    )
    batches = data.loader(train_set, sampler, "train", config.num_workers, world.device)
    evaluation = Evaluation(task, state.best_model, test_set, config, world)
    rates = Rates(state.optimizers, begun=state.step > 0)
    if state.step == 0 and (rehearsed := evaluation.rehearse()) is not None:
        state.stopping.check(rehearsed)  # what is wrong with metrics should not show after an epoch

    metrics = state.note(evaluation()) if state.owes_evaluation else {}
    if metrics and not state.is_over():
        run.checkpoint(state, metrics)
    while not state.is_over():
        epoch, first_step = plan.locate(state.step)
        sampler.set_epoch(epoch, first_step)
        for step, micro_batches, their_batches in data.by_step(batches, sampler):
            state.clear_gradients()
            done = gradients.of_step(step, micro_batches, their_batches)
            norm = clip(state.parameters, config.clip_norm)
            rates.set(task.rates(config, step, plan.total_steps))
            state.commit(done.buffers, norm, done.judge)

            if state.step % config.log_every == 0:
                run.log_step(state, done.loss, norm)
            metrics = state.note(evaluation()) if state.due_for_evaluation else {}
            if state.is_over():
                break
            run.checkpoint(state, metrics)

    run.finish(state, metrics)


if __name__ == "__main__":
    leave(exit_code(main))

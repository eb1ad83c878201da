"""The parts of a run before anything is loaded or written: this process, the data, the model, the state."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..common import display, keeper_link
from ..common.errors import Refusal, place_of, seen_at
from ..common.memory import keep_freed_memory
from ..common.naming import VALIDATION
from ..common.phases import COMPILE_TIMEOUT, START_UP, activity
from ..common.versions import TORCH_FOR_SHARDING, numbers
from ..config import Config, devices_per_rank, shard_size, validate
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.order import positions_in
from ..data.plan import Plan
from ..data.randomness import seed_task
from ..distributed.collectives import before_the_group
from ..distributed.placement import place
from ..distributed.sync_batchnorm import synchronise
from ..distributed.world import World
from ..training.balance import refuse_unequal
from ..training.batch_size_finder import Probe
from ..training.checks import check_model, checked_optimizers
from ..training.classification import Classification
from ..training.compilation import compile_networks, in_place
from ..training.cut import refuse_single_samples
from ..training.determinism import fix_arithmetic, threads_of_a_rank
from ..training.early_stopping import Stopping
from ..training.freezing import freeze, refuse_merging, refuse_owned
from ..training.meta_device import built_on_meta
from ..training.oom import note_batch
from ..training.precision import Scaler
from ..training.recomputation import recompute
from ..training.refresh import Refresh, refuse_unrefreshable
from ..training.schedulers import Schedulers, checked_schedulers
from ..training.state import State
from ..training.task import Task
from ..training.task_data import evaluation_sets, has_own_collate, refuse_overlap, training_set
from ..training.task_state import TaskState
from ..training.whole_batch import refuse_unfit
from .checkpointer import SLOWEST
from .verification import refuse_unverifiable
from .weights import read_weights

log = logging.getLogger(__name__)

WEIGHTS_PER_SECOND = 2e7
"""Weights that a slow CPU initialises in a second."""


def prepare(config: Config, task: Task, recorded: Mapping[str, Any]) -> tuple[World, dict[str, SizedDataset]]:
    """This process's devices, arithmetic and threads, without a process group yet; the training data and that of the
    evaluation, by name.

    Args:
        config: the options.
        task: whose data it is.
        recorded: values that the run has recorded for options that were left open.

    Raises:
        Refusal: the environment is not torchrun's, or the options contradict it or the data.
    """
    refuse_unfit(task, config)
    refuse_unequal(task, config)
    refuse_unverifiable(config, task)
    world = prepare_process(config, recorded)
    if not config.eval_only:
        shard_size(config, world.world_size)
    activity.enter(START_UP, "data")
    with before_the_group("train_dataset"):
        train_set = training_set(task, config)
    refuse_unrefreshable(task, train_set)
    samples = positions_in(train_set)
    with contextlib.nullcontext() if samples else seen_at(task.train_dataset):
        validate(config, samples)
    refuse_lacking(config, task)
    sets = evaluation_sets(task, config)
    if not sets:
        refuse_evaluation(config)
    if config.validation:
        refuse_overlap(train_set, sets[VALIDATION])
    return world, {TRAINING: train_set} | sets


def refuse_lacking(config: Config, task: Task) -> None:
    """Refuse options that need a package which is not installed, or a task of another kind."""
    if config.tensorboard and not find_spec("tensorboard"):
        raise Refusal("--tensorboard: needs the package tensorboard; pip install tensorboard")
    if config.save_predictions and not isinstance(task, Classification):
        raise Refusal(f"--save-predictions: needs a task derived from Classification; {type(task).__name__} is not")
    if config.strategy == "dp" and has_own_collate(task):
        raise Refusal(
            f"--strategy dp: divides a batch among GPUs by its samples, which are not known of a batch that "
            f"{type(task).__name__}.collate() makes; start one process for each GPU (torchrun, --strategy ddp)"
        )


def refuse_evaluation(config: Config) -> None:
    """Refuse the options that need an evaluation, of a task that has no data for one."""
    asked = {f"--patience {config.patience}": config.patience, "--eval-only": config.eval_only}
    for option, typed in (asked | {"--save-predictions": config.save_predictions}).items():
        if typed:
            raise Refusal(
                f"{option}: there is nothing to evaluate on, because test_dataset() returned None; return data, give "
                f"--validation 0.1, or leave {option.partition(' ')[0]} out"
            )


def prepare_process(config: Config, recorded: Mapping[str, Any]) -> World:
    """This process's devices, arithmetic and threads; raises as :func:`prepare`."""
    keeper_link.send("limit", str(config.keeper_restarts))
    keeper_link.send("grace", str(config.grace))
    display.start()
    keep_freed_memory()
    undone = fix_arithmetic(config.exact, config.precision == "tf32")
    world = World.from_environment(devices_per_rank(config), config.strategy, config.share_gpu)
    if undone and world.rank == 0:
        display.say(f"evenkeel: {undone}")
    threads = recorded.get("threads") or threads_of_a_rank(config.exact, world.local_world_size)
    torch.set_num_threads(config.threads or threads)
    if config.memory_snapshot and world.device.type != "cuda":
        raise Refusal("--memory-snapshot: records memory of GPUs, and this process computes on the CPU; leave it out")
    return world


def build_model(config: Config, task: Task) -> nn.Module:
    """The model with its random weights, from the run's seed."""
    seed_task(config.seed, "weights")
    try:
        with before_the_group("model"):
            model = task.model()
    except (RuntimeError, AssertionError) as error:  # torch's, without a driver, a GPU or CUDA
        note_batch(error, None, "make the network in model() smaller, or make room")
        # a machine with a GPU may have lost its driver for a moment
        if any(Path("/dev").glob("nvidia*")) or not re.search("NVIDIA driver|CUDA", str(error)):
            raise
        where = f"model() uses a GPU{place_of(error.__traceback__)}, and there is none"
        raise Refusal(f"{where}: return it on the CPU; Evenkeel moves it") from error
    with seen_at(task.model):
        check_model(model, learns=not config.eval_only)
    return in_place(model)


def build_model_of_rank(config: Config, task: Task, world: World) -> tuple[nn.Module, str]:
    """As :func:`build_model`, but with --shard on only rank 0 has memory for weights, and sends them (:func:`shard`).

    Returns:
        The model; and why this rank has memory for them too, if the task's cannot be built without.
    """
    if config.shard == "off" or world.rank == 0:
        model = build_model(config, task)
        with seen_at(task.model):
            refuse_owned(task, model)
            refuse_merging(model)
        return model, ""
    seed_task(config.seed, "weights")
    model, why_not_meta = built_on_meta(
        task, lambda model: task.optimizers(model, config), lambda: build_model(config, task)
    )
    if why_not_meta:
        return model, why_not_meta
    check_model(model, on_meta=True)
    return in_place(model), ""


def build_state(
    config: Config, task: Task, world: World, plan: Plan, model: nn.Module, sets: Mapping[str, SizedDataset]
) -> State:
    """The state before the first step: weights from a file if asked for, the model on its devices, the optimizers.

    ``sets`` are the training data and, by name, those of the evaluation; --patience uses the first of these.

    Raises:
        Refusal: the weights do not fit, or an option does not fit this model.
    """
    origin = ""
    if config.init_from and (world.rank == 0 or config.shard == "off") and config.init_from.exists():
        origin = "--init-from {}: {}".format(*read_weights(model, config.init_from, config.init_partial))
    freeze(model, config.freeze)
    refuse_single_samples(config, task.loss, model, plan, world, sets[TRAINING])
    if config.sync_batchnorm:
        synchronise(model, plan, world, config.reduce, task.unused_parameters)
    placed = place(model, config, world.devices)
    if config.checkpoint_activations:
        recompute(model, task.blocks(model))
    if config.compile:
        parts = task.blocks(model) if config.shard != "off" else ()  # weights are gathered between them
        compile_networks(model, world.device, config.exact, config.reduce == "tree", parts)
    scaler = Scaler(world.device, config.loss_scale) if config.precision == "fp16" else None
    every = config.eval_every or plan.steps_per_epoch
    decides = next((name for name in sets if name != TRAINING), "")
    best = task.best if decides else None
    stopping = Stopping(plan.total_steps, every, best, config.patience, decides, task.best is Task.best)
    seed_task(config.seed, "optimizers")
    with seen_at(task.optimizers):
        optimizers = checked_optimizers(task.optimizers(model, config), model)
    if config.shard != "off":
        refuse_old_torch(config)
        from ..training.sharding import refuse_unshardable  # imports FSDP2, which takes a second

        refuse_unshardable(task, model, optimizers)
    own = task.schedulers(optimizers, replace(config, max_steps=plan.total_steps))
    made = checked_schedulers(own, optimizers, config, plan.total_steps, best, type(task).rates is not Task.rates)
    schedulers = Schedulers(made, best, plan.total_steps, every) if made else None
    return State(
        model, optimizers, skip_nonfinite=config.on_nonfinite == "skip", origin=origin, scaler=scaler, ema=config.ema,
        stopping=stopping, placed=placed, schedulers=schedulers,
        task_state=TaskState.of(task, config.seed, world, averages=config.ema > 0),
        refresh=Refresh.of(task, model, config, world), devices=world.devices, sharded=config.shard != "off",
    )  # fmt: skip


def shard(state: State, task: Task, world: World, config: Config) -> None:
    """For --shard: divide a state among the ranks, before it is loaded; the process group exists. All must call it.
    If it is divided already, or not to be, nothing happens."""
    if config.shard == "off" or state.sharding:
        return
    from ..training.sharding import Sharding

    average = state.average.model if state.average else None
    ranks = shard_size(config, world.world_size)
    state.divide(Sharding(state.model, average, state.optimizers, task, world, config.precision, ranks))


def warn_of_full_weights(state: State, world: World, why_not_meta: str) -> None:
    """Log on rank 0 what :func:`build_model_of_rank` says of memory on any rank. All must call it."""
    everywhere = world.all_gather(why_not_meta) if state.sharding else []
    reasons = [f"{why} (rank {rank})" for rank, why in enumerate(everywhere) if why]
    if reasons and world.rank == 0:
        size = sum(parameter.nbytes for parameter in state.parameters) / 1e6
        log.warning(
            "--shard: model() cannot be built without values, so at the start each process has all %.1f MB of the "
            "weights in the host's memory: %s", size, reasons[0],
        )  # fmt: skip


def find_micro_batch(
    config: Config, task: Task, world: World, train_set: SizedDataset, state: State
) -> tuple[int, str]:
    """For --micro-batch auto: see `Probe`. A state to divide is divided before, as in all steps.

    Raises:
        Refusal: a micro-batch has a single sample, and the model's BatchNorm cannot train on it.
    """
    shard(state, task, world, config)
    found, line = Probe(config, task, world, train_set, state)()
    config = replace(config, micro_batch=found)
    refuse_single_samples(config, task.loss, state.model, Plan.of(config, positions_in(train_set)), world, train_set)
    return found, line


def refuse_old_torch(config: Config) -> None:
    """Refuse --shard with a torch whose FSDP2 takes no other reduce-scatter, or does not recover from a failed pass if
    --micro-batch auto needs that."""
    if numbers(torch.__version__) < TORCH_FOR_SHARDING:
        raise Refusal(f"--shard {config.shard}: needs torch 2.9 or later, and this is {torch.__version__}")
    from torch.distributed.fsdp import FSDPModule  # takes a second

    if config.micro_batch == "auto" and not hasattr(FSDPModule, "reset_iter_state"):
        raise Refusal(
            f"--shard {config.shard} --micro-batch auto: needs a torch with FSDPModule.reset_iter_state, such as 2.15, "
            f"and this is {torch.__version__}; give a number"
        )


def timeouts(config: Config, ranks: int, state: State) -> tuple[timedelta, timedelta, timedelta]:
    """The three of `World.connected`. A collective's explains nothing, so the watch for hangs must come first, however
    long it waits for a rank that compiles or writes."""
    sharded, weights = config.shard != "off", sum(it.numel() for it in state.parameters)
    # a rank writes weights, two moments and an average, in 4 bytes each; in a sharded run its rows of them
    writing = 4 * 4 * weights / (shard_size(config, ranks) if sharded else 1) / SLOWEST
    longest = max(600, config.hang_timeout) + 300 + max(COMPILE_TIMEOUT if config.compile else 0.0, writing)
    # in a sharded run rank 0 initialises all weights, while the others wait for it
    initialising = weights / WEIGHTS_PER_SECOND if sharded else 0.0
    return timedelta(seconds=longest), timedelta(seconds=initialising), timedelta(seconds=config.grace)

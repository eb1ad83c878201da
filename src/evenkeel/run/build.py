"""Build the model and the state of a run, the same on every rank, before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from ..config import Config
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..data.randomness import seed_task
from ..distributed.placement import place
from ..distributed.sync_batchnorm import synchronise
from ..distributed.world import World
from ..training.checks import check_model, checked_optimizers
from ..training.compilation import compile_networks, in_place
from ..training.cut import refuse_single_samples
from ..training.early_stopping import Stopping
from ..training.freezing import freeze
from ..training.precision import Scaler
from ..training.schedulers import Schedulers, checked_schedulers
from ..training.state import State
from ..training.task import Task
from .weights import read_weights


def build_model(config: Config, task: Task) -> nn.Module:
    """The model with its random weights, from the run's seed."""
    seed_task(config.seed, "weights")
    model = task.model()
    check_model(model, learns=not config.eval_only)
    return in_place(model)


def build_state(
    config: Config, task: Task, world: World, plan: Plan, model: nn.Module, sets: Mapping[str, SizedDataset]
) -> State:
    """The state before the first step: weights from a file if asked for, the model on its devices, the optimizers.

    ``sets`` are the training data and, by name, those of the evaluation; --patience goes by the first of these.

    Raises:
        Refusal: the weights do not fit, or an option does not fit this model.
    """
    origin = ""
    if config.init_from:
        origin = "--init-from {}: {}".format(*read_weights(model, config.init_from, config.init_partial))
    freeze(model, config.freeze)
    refuse_single_samples(config, task.loss, model, plan, world, sets[TRAINING])
    if config.sync_batchnorm:
        synchronise(model, plan, world, config.reduce, task.unused_parameters)
    placed = place(model, config, world.devices)
    if config.compile:
        compile_networks(model, world.device, config.exact, whole=config.reduce == "tree")
    scaler = Scaler(world.device, config.loss_scale) if config.precision == "fp16" else None
    every = config.eval_every or plan.steps_per_epoch
    decides = next(name for name in sets if name != TRAINING)
    stopping = Stopping(plan.total_steps, every, task.best, config.patience, decides)
    seed_task(config.seed, "optimizers")
    optimizers = checked_optimizers(task.optimizers(model, config), model)
    own = task.schedulers(optimizers, replace(config, max_steps=plan.total_steps))
    made = checked_schedulers(own, optimizers, config, plan.total_steps, task.best, type(task).rates is not Task.rates)
    schedulers = Schedulers(made, task.best, plan.total_steps, every) if made else None
    skip = config.on_nonfinite == "skip"
    return State(model, optimizers, skip, origin, scaler, config.ema, stopping, placed, schedulers)

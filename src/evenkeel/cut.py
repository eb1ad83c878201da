"""Into how many micro-batches a step is cut, where nobody says: as few as keep all ranks at work.

Small micro-batches cost time (two to four times, measured), and no more of them are needed than there are ranks. The
cut shapes the result, though: dropout, mixing and BatchNorm's groups are those of a micro-batch. So it is decided once,
when a run starts, and recorded; on another number of ranks later the run keeps it, as long as each of them has work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .config import Config, number_in
from .launch import LARGEST_WORLD
from .plan import Plan
from .world import World

Recorded = Mapping[str, Any]
Cutter = Callable[[Recorded], Config]
"""From what a run has recorded (nothing, if it is new) to its options, the cut among them."""


def settle(config: Config, world_size: int, has_batchnorm: Callable[[], bool], recorded: Recorded) -> Config:
    """The options with --micro-batch or --micro-batches filled in, unless that is auto.

    What is typed counts; else what the run has recorded; else the default for this number of ranks. A recorded default
    that would leave ranks idle is cut anew, unless bits are promised or BatchNorm's groups are those of the ranks.

    Args:
        config: options as they were typed.
        world_size: W, ranks at work.
        has_batchnorm: whether the model cannot be trained on a micro-batch of one sample; asked if there would be one.
        recorded: the run's "micro_batch" and "micro_batches"; empty for a new run.
    """
    if config.micro_batch or config.micro_batches:
        return config
    if recorded.get("micro_batches"):
        kept = replace(config, micro_batches=min(config.batch_size, recorded["micro_batches"]))
        exact = config.reduce == "tree" or config.strict_bits or config.sync_batchnorm
        wanted = _default(config, world_size, has_batchnorm)
        return kept if exact or kept.micro_batches >= min(world_size, wanted.micro_batches) else wanted
    if recorded.get("micro_batch"):
        return replace(config, micro_batch=recorded["micro_batch"])
    return _default(config, world_size, has_batchnorm)


def fact_of_the_job(config: Config) -> Config:
    """As :func:`settle` for a new run, whatever the number of ranks: an eighth of the batch."""
    if config.micro_batch or config.micro_batches:
        return config
    return replace(config, micro_batch=max(1, config.batch_size // 8))


def _default(config: Config, world_size: int, has_batchnorm: Callable[[], bool]) -> Config:
    if config.strategy == "dp":  # DataParallel divides the whole batch
        return replace(config, micro_batches=1)
    if config.reduce == "tree":
        return fact_of_the_job(config)
    largest = 0 if config.sync_batchnorm else (number_in(LARGEST_WORLD, 0, 2**20) if LARGEST_WORLD in os.environ else 0)
    count = world_size * max(1, -(-largest // world_size))
    pairs = config.batch_size // 2
    if count > pairs and has_batchnorm():
        count = pairs
    return replace(config, micro_batches=max(1, min(count, config.batch_size)))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether a layer in training mode takes its statistics from the micro-batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def passes(plan: Plan, world: World) -> str:
    """What it costs that the tree's cut does not follow the ranks, where one of them has several micro-batches."""
    each = -(-plan.max_world_size // world.world_size)
    if each == 1:
        return ""
    one = "GPU" if world.device.type == "cuda" else "process"
    who = f"each of {world.world_size} ranks" if world.world_size > 1 else f"this one {one}"
    return (
        f"--reduce tree cuts a step the same way on any number of ranks: {each} passes on {who}; in a new run "
        f"--micro-batch {-(-plan.global_batch // world.world_size)} is one, and faster"
    )

"""Into how many micro-batches a step is cut: by default as few as keep all ranks busy.

Small micro-batches cost time (a step takes two to four times as long), so there are no more than ranks. But the cut
changes the result: dropout, mixing and BatchNorm work within a micro-batch. So it is decided once, when a run starts,
and recorded; the run keeps it on another number of ranks, as long as each of them has work.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..common.arguments import LARGEST_WORLD, number_in
from ..common.errors import Refusal
from ..config import Config
from ..data.batch import to_device
from ..data.data_digest import one_sample
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..data.randomness import generators_kept
from ..distributed.data_parallel import chunks, replicas
from ..distributed.world import World
from .checks import TOO_FEW
from .loss import LossFunction, ModelWithLoss

Recorded = Mapping[str, Any]
Cutter = Callable[[Recorded], Config]
"""From what a run has recorded (nothing, if it is new) to its options with the cut."""


def decide_cut(config: Config, world_size: int, has_batchnorm: Callable[[], bool], recorded: Recorded) -> Config:
    """The options with --micro-batch or --micro-batches filled in, unless that is auto.

    A typed value counts; else the run's recorded one; else the default for this number of ranks. A recorded default
    that would leave ranks idle is replaced, unless bits must not change or with --sync-batchnorm. ``has_batchnorm`` is
    called only if a micro-batch would have one sample.
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
    """As :func:`decide_cut` for a new run, but independent of the number of ranks: an eighth of the batch."""
    if config.micro_batch or config.micro_batches:
        return config
    return replace(config, micro_batch=max(1, config.batch_size // 8))


def _default(config: Config, world_size: int, has_batchnorm: Callable[[], bool]) -> Config:
    if config.strategy == "dp":  # DataParallel divides the whole batch
        return replace(config, micro_batches=1)
    if config.reduce == "tree":
        return fact_of_the_job(config)
    elastic = LARGEST_WORLD in os.environ and not config.sync_batchnorm
    largest = number_in(LARGEST_WORLD, 0, 2**20) if elastic else 0
    count = world_size * max(1, -(-largest // world_size))
    pairs = config.batch_size // 2
    if count > pairs and has_batchnorm():
        count = pairs
    return replace(config, micro_batches=max(1, min(count, config.batch_size)))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether a layer in training mode takes its statistics from the micro-batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def refuse_single_samples(
    config: Config, loss: LossFunction, model: nn.Module, plan: Plan, world: World, train_set: SizedDataset
) -> None:
    """Refuse a cut in which a micro-batch has a single sample, if the model's BatchNorm cannot be trained on one.

    With --micro-batch auto only steps of one sample are found, because the cut is not known yet.
    """
    gpus = len(replicas(config.strategy, world.device))
    if plan.batches:  # of many sizes
        if any(1 in chunks(int(size), gpus) for size in set(plan.batches.sizes)) and has_batchnorm(model):
            raise Refusal(
                f"--batch-tokens {config.batch_tokens}: a micro-batch has only one sample, and the model's BatchNorm "
                "cannot train on one; allow more tokens, or fewer --micro-batches"
            )
        return
    step = single(plan, gpus, config.sync_batchnorm)
    if step is None or not has_batchnorm(model) or takes_one_sample(config, loss, model, train_set):
        return
    batch = config.batch_size
    micro = config.micro_batch if isinstance(config.micro_batch, int) and not config.sync_batchnorm else 0
    others = [{"micro_batch": n} for n in _near(micro, batch)] if micro else []
    others += [{"batch_size": n} | ({"micro_batch": min(micro, n)} if micro else {}) for n in _near(batch, plan.length)]
    remedy = "use " + ("a larger --micro-batch, " if micro else "") + "another --batch-size, or more training data"
    for other in others:
        if single(Plan.of(replace(config, **other), plan.length), gpus, config.sync_batchnorm) is None:  # type: ignore[arg-type]
            typed = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in other.items())
            remedy = f"{typed} leaves no single sample"
            break
    samples = plan.step_samples(step)
    raise Refusal(
        f"--batch-size {batch} --micro-batch {config.largest_micro_batch}: "
        f"{'the last step of an epoch' if step else 'every step'} has {samples} sample{'s' * (samples > 1)}, of which "
        f"a micro-batch gets only one, and the model's BatchNorm cannot train on one sample; {remedy}"
    )


def takes_one_sample(config: Config, loss: LossFunction, model: nn.Module, train_set: SizedDataset) -> bool:
    """Whether the loss can be computed for one sample. BatchNorm needs two values per channel, but these may be pixels,
    or from two batches that the loss joins. So a copy of the model is tried. Other errors are reported by training."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with generators_kept(), torch.compiler.set_stance("force_eager") if config.compile else nullcontext():
        try:
            batch = one_sample(train_set, config.seed, config.num_workers > 0)
            ModelWithLoss(copy.deepcopy(model), loss)(to_device(batch, device))
        except Exception as error:
            return TOO_FEW not in str(error)
    return True


def _near(size: int, most: int) -> list[int]:
    """Other numbers from half to twice the size, the nearest first."""
    return sorted(range(max(2, size // 2), min(most, 2 * size) + 1), key=lambda other: abs(other - size))


def single(plan: Plan, gpus: int = 1, together: bool = False) -> int | None:
    """A step of the first epoch in which a sample is computed alone, None if there is none: alone in a micro-batch, or
    on one of the GPUs that share it; with ``together``, where a step shares its statistics, alone in the step."""
    last = plan.steps_per_epoch - 1
    for step in (0, last) if plan.total_steps > last else (0,):
        sizes = [micro_batch.size for micro_batch in plan.micro_batches(step)]
        if any(1 in chunks(size, gpus) for size in ([sum(sizes)] if together else sizes)):
            return step
    return None

"""Micro-batches of one sample, of which BatchNorm may find no statistics; told before the start and not hours later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .config import Config
from .devices import replicas
from .errors import Refusal
from .plan import Plan, chunks
from .tasks import Task
from .world import World


def refuse_single_samples(config: Config, task: Task, model: nn.Module, plan: Plan, world: World) -> None:
    """Refuse a cut that leaves a single sample to a model that cannot be trained on one.

    With --micro-batch auto only steps of one sample are seen, because the rest of the cut is not known yet.

    Args:
        config: the options.
        task: says whether its model can.
        model: frozen where it is to be, its BatchNorm layers as the task has made them.
        plan: how steps are cut.
        world: with --strategy dp its GPUs cut once more.

    Raises:
        Refusal: names the sizes, and others that leave none.
    """
    gpus = len(replicas(config.strategy, world.device))
    step = single(plan, gpus, config.sync_batchnorm)
    if step is None or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    if task.takes_one_sample(model):
        return
    samples = plan.step_samples(step)
    others = (typed for typed, cut in _other_cuts(config, plan) if single(cut, gpus, config.sync_batchnorm) is None)
    other = next(others, "")
    raise Refusal(
        f"--batch-size {plan.global_batch} --micro-batch {config.largest_micro_batch}: "
        f"{'the last step of an epoch' if step else 'every step'} has {samples} sample{'s' * (samples > 1)}, of which "
        "a micro-batch gets only one, and the model's BatchNorm cannot be trained on that; "
        + (f"{other} leaves no single sample" if other else "use more training data")
    )


def single(plan: Plan, gpus: int = 1, together: bool = False) -> int | None:
    """A step of the first epoch in which one sample is computed alone; None if there is none.

    Args:
        plan: how steps are cut.
        gpus: among which each micro-batch is divided.
        together: statistics are those of the whole step.
    """
    last = plan.steps_per_epoch - 1
    for step in sorted({0, last}) if plan.total_steps > last else [0]:
        whole = [plan.step_samples(step)]
        sizes = whole if together else [micro_batch.size for micro_batch in plan.micro_batches(step)]
        if any(1 in chunks(size, gpus) for size in sizes):
            return step
    return None


def _other_cuts(config: Config, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Other plans and how they are typed, those first that change least."""
    batch, micro = plan.global_batch, plan.micro_batch
    follows = bool(plan.number) or config.sync_batchnorm  # the micro-batch follows the batch
    if not follows:
        for size in (*range(micro - 1, 1, -1), *range(micro + 1, batch + 1)):
            yield f"--micro-batch {size}", replace(plan, micro_batch=size)
    for size in (*range(batch - 1, 1, -1), *range(batch + 1, plan.samples + 1)):
        cut = size if follows else min(micro, size)
        if plan.number:
            cut = -(-size // plan.number)
        typed = f"--batch-size {size}" + (f" --micro-batch {cut}" if not follows else "")
        yield typed, replace(plan, global_batch=size, micro_batch=cut)

"""Before an attempt's first step: mirror and disk, equal models, and are ranks, devices and readers used well?"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from torch import nn

from ..common.errors import EndedForGood, Refusal, seen_at
from ..common.processes import count_cores
from ..config import Config
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..data.streams import stream_of
from ..distributed.devices import explain_unused
from ..distributed.world import World
from ..training.balance import first_counts
from ..training.memory_parts import bytes_after_a_step
from ..training.precision import substitute
from ..training.state import State
from ..training.task import Task
from .earlier_run import MIRRORED


def refuse_unmirrored(config: Config) -> None:
    """Refuse --mirror where no process copies the run's folder: torchrun's agent of the launchers starts one."""
    if config.mirror and os.environ.get(MIRRORED) != os.path.abspath(config.run_dir or ""):  # noqa: PTH100
        if not find_spec(f"{__package__.rpartition('.')[0]}.mirror"):
            raise Refusal("--mirror: has been deleted from this copy of Evenkeel; leave it out")
        how = "start by launch/single_node.py, launch/multi_node.py or `python train.py -g 1`"
        raise Refusal(
            f"--mirror: no process copies the checkpoints; {how}, with options of train.py and its --task only"
        )


def warnings_at_start(config: Config, plan: Plan, world: World, sets: Mapping[str, SizedDataset]) -> Iterator[str]:
    """Each in a line; "" for those that do not apply."""
    if (idle := world.world_size - plan.micro_batches_per_step) > 0:
        smaller = "a smaller --micro-batch or " if plan.micro_batch > 1 else ""
        parts = f"{plan.micro_batches_per_step} micro-batch{'es' if plan.micro_batches_per_step > 1 else ''}"
        yield (
            f"{idle} of {world.world_size} ranks {'have' if idle > 1 else 'has'} nothing to do: all share --batch-size "
            f"{config.batch_size}, which makes only {parts}; {smaller}a larger --batch-size uses more ranks"
        )
    if config.num_workers > (cores := count_cores()):
        many = f"{config.num_workers} loader processes of each rank share this machine's {cores} cores"
        yield f"--num-workers {config.num_workers}: {many}, and all start at once; a few are enough"
    yield substitute(config.precision, world.device)
    yield explain_unused()
    if stream := stream_of(sets.get(TRAINING)):
        yield stream.shared(plan, world.world_size, config.num_workers, first_counts(config, plan, world.world_size))


def disk_needed(config: Config, steps: int, state: State) -> str:
    """How many checkpoints a run of so many steps leaves with --keep-every, and their size, in a line."""
    from rich.filesize import decimal  # takes time to import, and most runs have no --keep-every

    size, more = sum(tensor.nbytes for tensor in state.tensors().values()), ""
    try:
        whole = state.sharding.whole if state.sharding else {}
        begun = [it for it in state.optimizers if not it.state]
        size += sum(bytes_after_a_step(it, lambda p: whole.get(p, p).shape) for it in begun)
    except Exception:  # a task's own optimizer may do anything in its step
        more = " and the optimizer's state"
    kept = steps // config.keep_every
    count = kept + config.keep + config.keep_best
    return (
        f"at step {steps} the disk holds up to {count} checkpoints of {decimal(size)}{more} ({kept} by --keep-every, "
        f"{config.keep} by --keep, {config.keep_best} by --keep-best): {decimal(count * size)}"
    )


def end_if_models_differ(world: World, task: Task, model: nn.Module) -> None:
    """End the run on all ranks if a rank has other parameters, which DDP notices on that rank only."""
    mine = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    digests = world.all_gather(hashlib.sha256(repr(mine).encode()).hexdigest())
    if len({*digests}) == 1:
        return
    everywhere = world.all_gather(mine)
    rank = next(rank for rank, theirs in enumerate(everywhere) if theirs != everywhere[0])
    first, its = dict(everywhere[0]), dict(everywhere[rank])
    differing = next((name for name in first | its if first.get(name) != its.get(name)), "")
    what = f"{differing} is {its.get(differing, 'missing')}, not {first.get(differing, 'missing')}"
    what = what if differing else "its layers come in another order"
    with seen_at(task.model):
        raise EndedForGood(
            f"model() of rank {rank} differs from rank 0's: {what}; it must not depend on the rank, nor on a generator "
            "of its own"
        )

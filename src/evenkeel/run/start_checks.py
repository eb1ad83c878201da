"""Before an attempt's first step: is there a mirror for --mirror, and are ranks, devices and readers used well?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from ..common.errors import Refusal
from ..config import Config
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..data.streams import stream_of
from ..distributed.devices import explain_unused
from ..distributed.world import World
from ..training.balance import first_counts
from ..training.precision import substitute
from .records import MIRRORED


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
    if (idle := world.world_size - plan.max_world_size) > 0:
        smaller = "a smaller --micro-batch or " * (plan.micro_batch > 1)
        parts = f"{plan.max_world_size} micro-batch{'es' * (plan.max_world_size > 1)}"
        yield (
            f"{idle} of {world.world_size} ranks {'have' if idle > 1 else 'has'} nothing to do: all share --batch-size "
            f"{config.batch_size}, which makes only {parts}; {smaller}a larger --batch-size uses more ranks"
        )
    yield substitute(config.precision, world.device)
    yield explain_unused()
    if stream := stream_of(sets.get(TRAINING)):
        yield stream.shared(plan, world.world_size, config.num_workers, first_counts(config, plan, world.world_size))

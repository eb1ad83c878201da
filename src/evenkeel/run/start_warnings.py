"""Warnings before an attempt's first step: ranks, devices or readers that are not used well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..config import Config
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..data.streams import stream_of
from ..distributed.devices import explain_unused
from ..distributed.world import World
from ..training.precision import substitute
from ..training.shares import first_shares


def at_start(config: Config, plan: Plan, world: World, sets: Mapping[str, SizedDataset]) -> Iterator[str]:
    """Each warning in a line; "" for those that do not apply."""
    if (idle := world.world_size - plan.max_world_size) > 0:
        yield (
            f"{idle} of {world.world_size} ranks have nothing to do: the batch of {config.batch_size} is cut into "
            f"{plan.max_world_size} micro-batches of {config.micro_batch}; a smaller --micro-batch uses more ranks"
        )
    yield substitute(config.precision, world.device)
    yield explain_unused()
    if stream := stream_of(sets.get(TRAINING)):
        yield stream.shared(plan, world.world_size, config.num_workers, first_shares(config, plan, world.world_size))

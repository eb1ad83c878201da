"""What all ranks agree on before an attempt is recorded: options, the cut of steps, with --strict-bits the bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..common.arguments import flag
from ..common.errors import Refusal
from ..common.phases import START_UP, activity
from ..config import Config, changed_options
from ..config.options import ALIKE
from ..data.plan import Plan
from ..distributed.sync_batchnorm import refuse_too_few_ranks
from ..distributed.world import World
from ..training.cut import Cutter
from .checkpoint import Checkpoints
from .fingerprint import compare_bits


class Agreed(NamedTuple):
    """The options with the cut, the plan with it, and a line about a cut that was found, else ""."""

    config: Config
    plan: Plan
    line: str


def refuse_other_options(world: World, config: Config, options: dict[str, Any], harmless: frozenset[str]) -> None:
    """Refuse options that differ between ranks: each node has checked only its own command line and copy.

    Args:
        options: those that the run records.
        harmless: options of the task that may differ.
    """
    everywhere = world.all_gather((options, {name: getattr(config, name) for name in sorted(ALIKE)}))
    first_options, alike = everywhere[0]
    for rank, (typed, here_alike) in enumerate(everywhere):
        other = [(name, value, here_alike[name]) for name, value in alike.items() if here_alike[name] != value]
        if differing := [*changed_options(first_options, typed, harmless), *other]:
            name, first, here = differing[0]
            raise Refusal(f"{flag(name)} is {first} on rank 0 and {here} on rank {rank}; type the same on all nodes")


def agree_on_cut(
    world: World, cutter: Cutter, plan: Plan, recorded: Mapping[str, Any], find: Callable[[], tuple[int, str]]
) -> Agreed:
    """Decide how steps are cut: as recorded for this run; for a new one, by options. The same on all ranks, whichever
    node has the run's folder.

    Args:
        plan: how steps are cut, as far as the options say.
        recorded: the newest status of any node that has a cut.
        find: is called on all ranks if a new run has --micro-batch auto.
    """
    config, line = cutter(recorded), ""
    if config.micro_batch == "auto":
        found = recorded.get("micro_batch", 0)
        if not found:
            activity.enter(START_UP, "--micro-batch auto")
            found, line = find()
        config = replace(config, micro_batch=int(found))
    plan = Plan.of(config, plan.length, plan.batches)
    if config.sync_batchnorm:
        refuse_too_few_ranks(plan, world.world_size)
    return Agreed(config, plan, line)


def refuse_other_bits(world: World, checkpoints: Checkpoints, starts_over: bool) -> None:
    """Refuse, with --strict-bits, a start whose bits may differ: from those of the newest manifest of any node, unless
    the run starts over, or between ranks."""
    manifests = world.all_gather(checkpoints.newest_manifest() if world.local_rank == 0 else None)
    present = [manifest for manifest in manifests if manifest and not starts_over]
    newest = max(present, key=lambda manifest: manifest.step, default=None)
    compare_bits(world.all_gather(checkpoints.provenance.fingerprint), newest, strict=True)

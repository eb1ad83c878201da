"""Hints about options that would save a run's time or memory. Each is logged once in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..common.phases import activity
from ..common.processes import count_cores
from ..config import Config
from ..data.plan import Plan
from ..distributed.world import World

SETTLED = 20.0
"""Seconds of training before parts of time are meaningful."""

WAITING, EVALUATING, SAVING, FULL, EMPTY = 0.2, 0.3, 0.1, 0.95, 0.5
"""Parts above which there is a hint: of the time, for data, evaluations and checkpoints; of a GPU's memory."""

MOST = 2
"""Maximum number of hints at a time."""


@dataclass(frozen=True)
class Figures:
    """The figures that hints depend on. Parts are 0 .. 1."""

    seconds: float  # of this attempt, without its start-up
    parts: Mapping[str, float]  # of that time: "data", "evaluation", "checkpoint"
    memory: float | None = None  # the largest part of the GPU's memory that was in use; None: no GPU
    micro_batches: int = 1  # of one rank in a step
    num_workers: int = 0
    cores: int = 8  # of each rank
    eval_every: int = 1  # steps; 0: another value would not help, or be refused
    checkpoint_every: int = 1


def hints(it: Figures) -> dict[str, str]:
    """Hints by subject: at most two, the most urgent first.

    >>> hints(Figures(60.0, {"data": 0.38}))
    {'data': 'data wait 38 %: try --num-workers 4'}
    """
    if it.seconds < SETTLED:
        return {}
    data, evaluation, checkpoint = (it.parts.get(name, 0.0) for name in ("data", "evaluation", "checkpoint"))
    found = {}
    if it.memory is not None and it.memory > FULL:
        found["memory"] = f"GPU memory is {_percent(it.memory)} full: a smaller --micro-batch leaves room for peaks"
    if data > WAITING:
        more = min(max(4, 2 * it.num_workers), it.cores)
        remedy = f"try --num-workers {more}" if more > it.num_workers else "make samples cheaper to read, docs/data.md"
        found["data"] = f"data wait {_percent(data)}: {remedy}"
    if evaluation > EVALUATING and it.eval_every:
        every = 4 * it.eval_every
        found["evaluation"] = f"evaluation takes {_percent(evaluation)} of the time: try --eval-every {every}"
    if checkpoint > SAVING and it.checkpoint_every:
        every = 4 * it.checkpoint_every
        found["checkpoint"] = f"checkpoints take {_percent(checkpoint)} of the time: try --checkpoint-every {every}"
    if it.memory is not None and it.memory < EMPTY and it.micro_batches > 1:
        found["micro_batch"] = (
            f"GPU memory is {_percent(it.memory)} full, and a rank computes {it.micro_batches} micro-batches a step: "
            "a larger --micro-batch is faster"
        )
    return dict(list(found.items())[:MOST])


def measure(config: Config, plan: Plan, world: World) -> Figures:
    """The figures of this process now."""
    spent = {name: seconds for name, seconds in activity.spent().items() if name != "start_up"}
    total, gpu, memory = max(sum(spent.values()), 1e-9), world.device, None
    if gpu.type == "cuda" and not world.shares_gpu:
        memory = torch.cuda.max_memory_reserved(gpu) / torch.cuda.get_device_properties(gpu).total_memory
    return Figures(
        seconds=total,
        parts={name: seconds / total for name, seconds in spent.items()},
        memory=memory,
        micro_batches=len(plan.shares(0, world.world_size)[0]),
        num_workers=config.num_workers,
        cores=count_cores() // world.local_world_size,
        eval_every=0 if config.patience else config.eval_every or plan.steps_per_epoch,
        checkpoint_every=0 if config.digest_every else config.checkpoint_every,  # digests count as checkpoints
    )


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"

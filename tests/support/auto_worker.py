"""--micro-batch auto on divided ranks, of which the last has less memory: what each finds, and what the trials leave.

torchrun --nproc_per_node=W auto_worker.py OUT.json {ours,control} {forward,backward} OPTION...

The control has real collectives in the trials, in which ranks wait for each other; they give up after ten seconds.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from hungry_blocks_task import HungryBlocks
from steps import rank_0_writes

from evenkeel.common.errors import Ended
from evenkeel.config import Config
from evenkeel.data.data_digest import TRAINING
from evenkeel.data.plan import Plan
from evenkeel.distributed.sharded_reduction import ShardedReduction
from evenkeel.distributed.world import World
from evenkeel.run.build import build_model, build_state, find_micro_batch, shard
from evenkeel.training.state_dicts import undivided
from evenkeel.training.task_data import training_set


@contextmanager
def together(reduction: ShardedReduction, micro_batches: int) -> Iterator[None]:
    """The control: a trial is a round of all ranks."""
    reduction.micro_batches, reduction.round = min(micro_batches, reduction.world.world_size), 0
    yield


def outcome(world: World) -> list[dict]:
    """Of each rank: the number or the error; whether state and generators are as before; whether a pass still works."""
    os.environ["ROOM"] = os.environ["ROOMS"].split()[world.rank]
    if sys.argv[2] == "control":
        ShardedReduction.trial = together
    ema, precision, recompute = sys.argv[4:7]
    config = Config(
        batch_size=16, micro_batch="auto", shard="on", reduce="tree", ema=float(ema), precision=precision,
        checkpoint_activations=recompute == "recompute",
    ).resolved()  # fmt: skip
    task = HungryBlocks(hungry_in=sys.argv[3])
    train_set = training_set(task, config)
    state = build_state(config, task, world, Plan(50, 16, 4, 1), build_model(config, task), {TRAINING: train_set})
    shard(state, task, world, config)  # before it, the average has no values
    names = {name: undivided(tensor).clone() for name, tensor in state.tensors().items()}
    torch.manual_seed(5)
    expected, found = torch.rand(3), {}
    torch.manual_seed(5)
    try:
        found["number"], found["said"] = find_micro_batch(config, task, world, train_set, state)
    except Ended as error:
        found["error"] = str(error)
    found["generators"] = torch.equal(torch.rand(3), expected)
    after = state.tensors()
    whole = {name: undivided(tensor) for name, tensor in after.items()}
    found["tensors"] = names.keys() == whole.keys() and all(torch.equal(whole[it], names[it]) for it in names)
    found["gradients"] = any(parameter.grad is not None for parameter in state.model.parameters())
    if "number" in found:
        state.sharding.reduction.begin_step([range(world.world_size)])
        task.loss(state.model, torch.stack([train_set[number] for number in range(found["number"])])).backward()
        found["learns"] = all(parameter.grad is not None for parameter in state.parameters)
    return world.all_gather(found)


if __name__ == "__main__":
    rank_0_writes(outcome, timedelta(seconds=10 if sys.argv[2] == "control" else 600))

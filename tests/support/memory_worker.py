"""How much memory a rank takes for a sharded network: while it is divided, until then, and in a step or a trial of
--micro-batch auto. In bytes, or as a multiple of its part of the weights.

torchrun --nproc_per_node=W memory_worker.py OUT.json division {ours,held,before}
torchrun --nproc_per_node=W memory_worker.py OUT.json start EMA {meta,real}
torchrun --nproc_per_node=W memory_worker.py OUT.json peak {step,trial,control} MICRO_BATCH

Controls: something holds all rows of the parameters ("held"); all of the model comes to the GPU first ("before");
`model()` cannot be built on the meta device ("real"); nothing is reserved for sums between rounds ("control").
For "peak" set MALLOC_MMAP_THRESHOLD_, so that freed memory is given back.
"""

import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from sharded_task import Sharded
from steps import passes, rank_0_writes
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from evenkeel.config import Config
from evenkeel.data.data_digest import TRAINING
from evenkeel.data.plan import Plan
from evenkeel.distributed.placement import place
from evenkeel.distributed.world import World
from evenkeel.run.build import build_model, build_model_of_rank, build_state, shard
from evenkeel.training.batch_size_finder import Probe
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.sharding import Sharding
from evenkeel.training.state import State
from evenkeel.training.task import Task
from evenkeel.training.task_data import training_set

BATCH = 14
LARGE = 3000
"""A block of this width has 36 MB, too much for malloc to keep when it is freed."""


class Wide(Task):
    """Its memory is that of its weights."""

    def __init__(self, width: int, blocks: int, real: bool = False) -> None:
        self.width, self.depth, self.real = width, blocks, real

    def train_dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(2 * BATCH, self.width))

    def test_dataset(self) -> None:
        return None

    def model(self) -> nn.Module:
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(self.depth)]
        if self.real:
            torch.rand(1, device="cpu")
        return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(batch[0]).square().mean()


def division(world: World) -> dict[str, int]:
    """The bytes of the model and of a block, and by how many the peak grows: of the GPU, or without one the host's."""

    def most() -> int:
        if world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(world.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    way, blocks = sys.argv[3], 8
    model = Wide(LARGE, blocks).model()
    before = most()
    place(model, Config(shard="off" if way == "before" else "on"), world.devices)
    state = State(model, [torch.optim.SGD(model.parameters(), 0.1)], devices=world.devices)
    whole = [parameter.data for parameter in model.parameters()] if way == "held" else []
    state.divide(Sharding(model, None, state.optimizers, Sharded(), world, "fp32"))
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    del whole
    return {"model": total, "block": total // blocks, "growth": most() - before}


def start(world: World) -> dict[str, Any]:
    """The bytes of the model and of a block, and the growth of each rank until its model is divided."""

    def memory() -> dict[str, int]:  # in bytes, by kind; VmHWM: their largest sum so far
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0].startswith(("Rss", "VmHWM"))}

    def peak() -> int:  # of memory that is neither a file's nor shared, since the last call
        now = memory()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        return now["VmHWM"] - now["RssFile"] - now["RssShmem"]

    task, blocks = Wide(LARGE, 6, sys.argv[4] == "real"), 6
    config = Config(shard="on", reduce="tree", ema=float(sys.argv[3]), micro_batch=1, batch_size=4)
    torch.optim.SGD([torch.ones(1)])  # imports torch's compiler, whose memory does not count
    peak()
    before = memory()["RssAnon"]
    model, _ = build_model_of_rank(config, task, world)
    state = build_state(config, task, world, Plan(4, 4, 1, 1), model, {TRAINING: task.train_dataset()})
    shard(state, task, world, config)
    return {"model": 4 * blocks * LARGE**2, "block": 4 * LARGE**2, "growth": world.all_gather(peak() - before)}


def address_space(name: str) -> int:
    """Bytes: VmPeak or VmSize."""
    return int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def peak(world: World) -> float:
    """By how many times a rank's part of the weights its peak is above what it had before."""
    way, size, width, blocks = sys.argv[3], int(sys.argv[4]), 1024, 8
    task = Wide(width, blocks)
    config = Config(batch_size=BATCH, micro_batch="auto", shard="on", reduce="tree", optimizer="adamw").resolved()
    plan, train_set = Plan(2 * BATCH, BATCH, size, 1), training_set(task, config)
    state = build_state(config, task, world, plan, build_model(config, task), {TRAINING: train_set})
    shard(state, task, world, config)
    before = address_space("VmSize")
    if way == "step":
        model = DistributedLoss(task.loss, state, world, plan, config)
        for step in range(2):
            every, ranks = plan.micro_batches(step), world.world_size
            own = [every[n if n < len(every) else 0] for n in range(world.rank, -(-len(every) // ranks) * ranks, ranks)]
            passes(model, step, own, [[torch.ones(it.size, width)] for it in own])
            model.step()
    else:
        if way == "control":
            Probe._more_gradients = lambda _self, _size: 0
        assert Probe(config, task, world, train_set, state)._try(size) is None
    return (address_space("VmPeak") - before) / (blocks * width**2 * 4 / world.world_size)


if __name__ == "__main__":
    rank_0_writes({"division": division, "start": start, "peak": peak}[sys.argv[2]])

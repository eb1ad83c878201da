"""What exactness costs a step: the tree against the ring, and both against no exchange at all.

    torchrun --standalone --nproc_per_node=2 benchmarks/reduce.py

All train the same network in one process group, step by step in turn, with 1, 2 and 4 micro-batches for each rank.
"ring again" shows how much of a difference is noise; "bf16" is the ring with `--reduce-dtype bf16`; "alone" does not
exchange gradients, so what the others take longer is the communication that backward does not hide. Prints ratios of
medians, and the memory that the tree keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import torchvision
import tyro
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import Step
from evenkeel.distributed.reduction import TreeReduction
from evenkeel.distributed.world import World
from evenkeel.tasks.models import SmallCNN
from evenkeel.training.classification import Classification
from evenkeel.training.determinism import fix_arithmetic
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.state import State

Side = Literal["ring", "ring again", "bf16", "tree", "alone"]
SIDES: tuple[Side, ...] = ("ring", "ring again", "bf16", "tree", "alone")


def resnet18() -> nn.Module:
    """11.7 M parameters, which on a CPU take long to compute with."""
    return torchvision.models.resnet18(num_classes=10)


def mlp() -> nn.Module:
    """25 M parameters, which take long to send and not to compute with."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), *hidden, nn.Linear(2048, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (lambda: SmallCNN(10), (1, 8, 8)),
    "resnet18": (resnet18, (3, 64, 64)),
    "mlp": (mlp, (1, 8, 8)),
}
"""Name -> how to make the model, and the shape of a sample."""


class Plain(Classification):
    """Its loss is all that is needed here."""

    train_dataset = test_dataset = model = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Options:
    """Compare reductions."""

    models: tuple[Literal["cnn", "resnet18", "mlp"], ...] = ("cnn", "resnet18", "mlp")
    """Networks to train."""
    per_rank: tuple[int, ...] = (1, 2, 4)
    """Micro-batches for each rank, M / W."""
    size: int = 8
    """Samples of a micro-batch."""
    steps: int = 30
    """Steps of each side that are measured."""


def steps(side: Side, name: str, plan: Plan, world: World) -> Iterator[int]:
    """One step for each next(); yields the bytes that the reduction keeps."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    state = State(make().to(world.device), [])
    reduce: Literal["ring", "tree"] = "tree" if side == "tree" else "ring"
    dtype: Literal["fp32", "bf16"] = "bf16" if side == "bf16" else "fp32"
    gradients = DistributedLoss(Plain().loss, state, world, plan, Config(reduce=reduce, reduce_dtype=dtype))
    if side == "alone" and isinstance(gradients.module, DistributedDataParallel):
        gradients.module = gradients.module.module
    mine = plan.micro_batches(0, world.rank, world.world_size)
    batches = [(torch.randn(m.size, *shape), torch.randint(10, (m.size,))) for m in mine]
    while True:
        state.clear_gradients()
        for batch in gradients.micro_batches(Step(0, mine, iter(batches))):
            gradients.backward(gradients(batch))
        _ = gradients.loss
        yield kept(gradients.reduction) if isinstance(gradients.reduction, TreeReduction) else 0


def kept(tree: TreeReduction) -> int:
    """Bytes of the exchanges' memory."""
    memory = [t for exchange in tree._exchanges.values() for t in exchange._memory._tensors.values()]
    return sum(tensor.nbytes for tensor in [*memory, *tree._memory._tensors.values()])


def compare(name: str, plan: Plan, world: World, count: int) -> None:
    """Measure all sides of one network and print a line."""
    loops = {side: steps(side, name, plan, world) for side in SIDES}
    seconds: dict[Side, list[float]] = {side: [] for side in SIDES}
    bytes_kept = 0
    for step in range(count + 3):
        for side in SIDES[step % 5 :] + SIDES[: step % 5]:  # so that none always comes after the same other one
            begun = time.perf_counter()
            bytes_kept = max(bytes_kept, next(loops[side]))
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if step >= 3:  # warm-up: allocators, DDP's bucket rebuild
                seconds[side].append(time.perf_counter() - begun)
    if world.rank == 0:
        ring, again, bf16, tree, alone = (median(seconds[side]) for side in SIDES)
        print(
            f"{name:<9} M = {plan.micro_batches_per_step:<3} ring {ring * 1e3:7.1f} ms  "
            f"ring again / ring {again / ring:.3f}  bf16 / ring {bf16 / ring:.3f}  tree / ring {tree / ring:.3f}  "
            f"exposed communication: ring {(ring - alone) / ring:.1%}, "
            f"tree {(tree - alone) / tree:.1%}  memory kept {bytes_kept / 1e6:.0f} MB",
            flush=True,
        )


def main(options: Options) -> None:
    """Measure and print."""
    fix_arithmetic(exact=True)
    torch.set_num_threads(1)
    world = World.from_environment()
    with world.connected():
        for name in options.models:
            for per_rank in options.per_rank:
                samples = options.size * per_rank * world.world_size
                compare(name, Plan(samples, samples, options.size, epochs=1), world, options.steps)


if __name__ == "__main__":
    main(tyro.cli(Options))

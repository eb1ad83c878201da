"""Train small nets for some steps, our way and as controls; rank 0 writes what came out as JSON.

torchrun --nproc_per_node=W gradient_worker.py OUT.json worlds|resume|reduced|compressed
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import passes, rank_0_writes, training
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evenkeel.config import Config
from evenkeel.data.dataset import InMemory
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.tasks.classify import Classify
from evenkeel.training.classification import Classification
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.loss import LossFunction, ModelWithLoss
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.state import State
from evenkeel.training.state_dicts import sha256

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 62, 20, 4, 3  # a step has 5 micro-batches, the tail only one


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Task(Classification):
    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(SAMPLES, 6, generator=generator)
        return InMemory(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        return Net()


def flat(tensors: Any) -> list[float]:
    return torch.cat([t.detach().flatten().float() for t in tensors]).tolist()


def ours(world: World) -> dict[str, list[float]]:
    task, losses = Task(), []
    model = task.model()
    state = State(model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    for gradients in training(task, state, world, task.train_dataset(), (GLOBAL_BATCH, MICRO_BATCH), EPOCHS):
        gradients.step(clip_grad_norm(model.parameters(), 0.0))
        losses.append(gradients.loss.item())
    return {"weights": flat(model.parameters()), "statistics": flat(model.buffers()), "losses": losses}


def naive(world: World) -> dict[str, list[float]]:
    """The tutorial's loop: every rank takes a batch of its own, whose size has to be divided by hand."""
    task = Task()
    model = task.model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_set = TensorDataset(*task.train_dataset().tensors)
    sampler = DistributedSampler(train_set, seed=1)
    batch_size = GLOBAL_BATCH // world.world_size
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(images), labels).backward()
            optimizer.step()
    return {"weights": flat(model.parameters())}


def worlds(world: World) -> dict[str, Any]:
    result: dict[str, Any] = {"ours": ours(world), "naive": naive(world)}
    everywhere = world.all_gather((result["ours"]["weights"], result["ours"]["statistics"]))
    return result | {"ranks_agree": all(other == everywhere[0] for other in everywhere)}


class Stock(DistributedLoss):
    def __init__(self, loss: LossFunction, state: State, world: World, plan: Plan) -> None:
        super().__init__(loss, state, world, plan, unused_parameters=True)  # no hook of ours would know better
        self.module = DistributedDataParallel(ModelWithLoss(state.model, loss))


def take(task: Any, gradients: DistributedLoss, step: int) -> None:
    """Forward and backward of a step of `classify`."""
    data, world = task.train_dataset(), gradients.world
    gradients.state.clear_gradients()
    mine = gradients.plan.micro_batches(step, world.rank, world.world_size)
    passes(gradients, step, mine, [data.__getitems__(list(range(m.start, m.start + m.size))) for m in mine])


def trained(kind: type[DistributedLoss], world: World, stops: tuple[int, ...]) -> str:
    """The fingerprint after eight steps, with the wrapper and the optimizer built anew at each stop, as by a resume."""
    task, plan, saved = Classify(), Plan(samples=256, global_batch=32, micro_batch=8, epochs=1), None
    for first, end in zip((0, *stops), (*stops, plan.total_steps), strict=True):
        torch.manual_seed(0)
        model = task.model()
        state = State(model, [torch.optim.AdamW(model.parameters(), lr=1e-2)])
        if saved:
            state.restore(saved)
        gradients = kind(task.loss, state, world, plan)
        for step in range(first, end):
            take(task, gradients, step)
            gradients.step(clip_grad_norm(model.parameters(), 0.0))
        saved = state.capture()
    return sha256(model.state_dict())


def resume(world: World) -> dict[str, bool]:
    """Whether a resume after the third step leaves every bit as it is."""
    sides = {"ours": DistributedLoss, "stock": Stock}
    return {name: trained(kind, world, ()) == trained(kind, world, (3,)) for name, kind in sides.items()}


def reduced(world: World, fails_in: int | None) -> list[bool]:
    """For each of four steps whether the ranks hold one gradient after several micro-batches each.

    In the control one step is not reduced, as `static_graph` has done it (pytorch issue 143580).
    """
    torch.manual_seed(0)
    task, plan = Classify(width=2), Plan(samples=128, global_batch=32, micro_batch=5, epochs=1)
    state = State(task.model(), [])
    gradients = DistributedLoss(task.loss, state, world, plan)
    ddp: Any = gradients.module
    found = []
    for step in range(plan.total_steps):
        gradients.module = ddp.module if step == fails_in else ddp
        take(task, gradients, step)
        everyone = world.all_gather(flat(p.grad for p in state.parameters if p.grad is not None))
        found.append(all(other == everyone[0] for other in everyone))
    return found


def compressed(world: World, dtype: Literal["fp32", "bf16"]) -> dict[str, Any]:
    """The gradient of a step of two micro-batches a rank, the bytes sent for it, and whether the ranks agree."""
    torch.manual_seed(0)
    task, plan = Classify(width=2), Plan(samples=128, global_batch=32, micro_batch=8, epochs=1)
    state = State(task.model(), [])
    gradients = DistributedLoss(task.loss, state, world, plan, Config(reduce_dtype=dtype))
    sent, stock = [], dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.nbytes if tensor.dtype != torch.float64 else 0)  # float64: loss and counts
        return stock(tensor, *args, **options)

    dist.all_reduce = counted
    take(task, gradients, 0)
    dist.all_reduce = stock
    gradient = flat(p.grad for p in state.parameters if p.grad is not None)
    everyone = world.all_gather(gradient)
    return {"gradient": gradient, "bytes": sum(sent), "agree": all(other == gradient for other in everyone)}


WHAT: dict[str, Callable[[World], Any]] = {
    "worlds": worlds,
    "resume": resume,
    "compressed": lambda world: {dtype: compressed(world, dtype) for dtype in ("fp32", "bf16")},
    "reduced": lambda world: {"ours": reduced(world, None), "control": reduced(world, 2)},
}

if __name__ == "__main__":
    rank_0_writes(WHAT[sys.argv[2]])

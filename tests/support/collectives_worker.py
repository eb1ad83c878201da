"""How the ranks call collectives: rank 0 writes as JSON what matters to NCCL and shows on gloo.

torchrun --nproc_per_node=3 collectives_worker.py OUT.json [--share-gpu]

On GPUs without the controls, which might hang.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from steps import passes, rank_0_writes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.exchange import Exchange
from evenkeel.distributed.reduction import TreeReduction
from evenkeel.distributed.sync_batchnorm import synchronise
from evenkeel.distributed.world import World
from evenkeel.resilience import flight_recorder
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.loss import ModelWithLoss
from evenkeel.training.state import State
from evenkeel.training.task import Task


class Net(nn.Module):
    """Two norms, and a layer that only some batches use, if it is rare."""

    def __init__(self, rare: bool) -> None:
        super().__init__()
        self.is_rare = rare
        self.first, self.rare, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.first(x))
        x = x if self.is_rare and len(x) == 2 else self.rare(x)
        return self.last(self.norms[1](x))


class Kind(list[Tensor]):
    """A batch of a kind of its own, which DDP would make a plain list on a GPU."""


class Way(Task):
    def __init__(self, unused: bool) -> None:
        self.unused_parameters = unused

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        assert type(batch) is Kind
        return model(batch[0]).square().mean()

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return Net(self.unused_parameters)

    def train_dataset(self) -> Any: ...
    def test_dataset(self) -> Any: ...
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]: ...


class Calling(Way):
    collectives = True

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        dist.all_reduce(torch.zeros(1))
        return super().loss(model, batch)


def made(
    world: World, unused: bool, reduce: Literal["ring", "tree"], sync: bool = False, own: bool = False
) -> DistributedLoss:
    """For steps of two micro-batches, of three samples and of two, so that the third rank is idle; of three
    micro-batches, if the loss calls a collective of its `own`."""
    task, plan = Calling(unused) if own else Way(unused), Plan(6, 6, 2, epochs=1) if own else Plan(5, 5, 3, epochs=1)
    more = {"unused_parameters": unused, "collectives": own}
    model = task.model().to(world.device)
    if sync:
        synchronise(model, plan, world)
    return DistributedLoss(task.loss, State(model, []), world, plan, Config(reduce=reduce), **more)


def step(gradients: DistributedLoss) -> None:
    world = gradients.world
    mine = gradients.plan.micro_batches(0, world.rank, world.world_size)
    batches = [Kind([torch.randn(m.size, 4, generator=torch.Generator().manual_seed(m.id))]) for m in mine]
    gradients.state.clear_gradients()
    passes(gradients, 0, mine, batches)
    _ = gradients.loss


def recorded() -> dict[tuple[int, int], Any]:
    """All collectives of this rank so far, those of torch's C++ code too, by backend and number."""
    found = flight_recorder.taken()
    return {(kind, entry["record_id"]): entry for kind, trace in found.items() for entry in trace["entries"]}


def callers(world: World, gradients: DistributedLoss) -> int:
    """The most threads of a rank that call collectives in a step."""
    step(gradients)
    before = recorded()
    step(gradients)
    threads = {entry["thread_id"] for number, entry in recorded().items() if number not in before}
    return max(world.all_gather(len(threads)))


def callers_by_ddp(world: World) -> int:
    """The control: DDP looks for unused parameters, and the tree's thread has its own group, or gloo would hang."""
    gradients = made(world, True, "tree")
    reduction = TreeReduction(gradients.state.model, world, unused_parameters=False)
    loss = ModelWithLoss(gradients.state.model, Way(True).loss)
    ddp = DistributedDataParallel(loss, gradient_as_bucket_view=True, find_unused_parameters=True)
    ddp.register_comm_hook(None, reduction.hook)
    gradients.reduction, gradients.module = reduction, ddp
    exchange = dist.all_to_all_single
    dist.all_to_all_single = partial(exchange, group=dist.new_group())
    try:
        return callers(world, gradients)
    finally:
        dist.all_to_all_single = exchange


@contextmanager
def watched(found: list[int]) -> Iterator[None]:
    """Notes at each gather of BatchNorm for how many all-reduces the rank has not waited."""
    pending: set[int] = set()
    all_reduce, all_gather = dist.all_reduce, dist.all_gather

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work
            pending.add(id(self))

        def wait(self) -> None:
            self.work.wait()
            pending.discard(id(self))

        def get_future(self) -> Any:
            return self.work.get_future()

    def gather(*arguments: Any, **more: Any) -> Any:
        found.append(len(pending))
        return all_gather(*arguments, **more)

    dist.all_reduce = lambda tensor, async_op=False: Watched(all_reduce(tensor, async_op=async_op))
    dist.all_gather = gather
    try:
        yield
    finally:
        dist.all_reduce, dist.all_gather = all_reduce, all_gather


def not_waited_for(world: World, waits: bool) -> int:
    gradients = made(world, False, "ring", sync=True)
    ddp = DistributedDataParallel(
        gradients.module.module,
        bucket_cap_mb=1e-6,  # a bucket for each parameter
        gradient_as_bucket_view=True,
    )
    ddp.register_comm_hook(None, gradients.reduction.hook)
    gradients.module = ddp
    if not waits:
        gradients._synced._catch_up = None
    found: list[int] = []
    step(gradients)  # after which DDP has its buckets
    with watched(found):
        step(gradients)
    return max(max(rank, default=0) for rank in world.all_gather(found))


def failure(world: World) -> str:
    """What the user hears of an error in the tree's thread; all ranks have it at once."""
    gradients = made(world, False, "tree")
    step(gradients)
    send_sums = Exchange.send_sums

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    Exchange.send_sums = fail
    try:
        step(gradients)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Exchange.send_sums = send_sums
    return ""


def found(world: World) -> dict[str, Any]:
    result: dict[str, Any] = {
        "threads": callers(world, made(world, True, "tree")),
        "threads, own": callers(world, made(world, False, "tree", own=world.world_size == 3)),
        "not waited for": not_waited_for(world, True),
        "failure": failure(world),
        "recorded": sorted({entry["profiling_name"] for entry in recorded().values()}),
    }
    if world.device.type == "cpu":
        result["threads, control"] = callers_by_ddp(world)
        result["not waited for, control"] = not_waited_for(world, False)
    return result


if __name__ == "__main__":
    rank_0_writes(found)

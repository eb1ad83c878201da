"""A step of a small network under FSDP2: its bits, ours and in the usual way, or the bytes that each rank sends.

torchrun --nproc_per_node=W sharded_worker.py OUT.json {bits,fp32,bf16} MICRO_BATCHES [RANKS-OF-A-REPLICA]

"bits": fingerprints of gradients, norms and weights. A precision: the bytes, counted where torch hands collectives to
the process group, and what docs/sharding.md says. There may be several precisions, or numbers of micro-batches for
"bits", with commas between them: one start for all.
"""

import hashlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from sharded_task import LENGTH, VOCABULARY, Sharded
from steps import rank_0_writes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from evenkeel.distributed.world import World
from evenkeel.training.determinism import fix_arithmetic
from evenkeel.training.row_norm import clip_rows
from evenkeel.training.sharding import Sharding

WHAT, (MICRO_BATCHES, *MORE) = sys.argv[2].split(","), map(int, sys.argv[3].split(","))


def batch(number: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))


def replica_of(world: World) -> int:
    return int(sys.argv[4]) if len(sys.argv) > 4 else world.world_size


def stock(world: World) -> nn.Module:
    """As FSDP2's tutorial does it."""
    torch.manual_seed(0)
    size = replica_of(world)
    several = size < world.world_size  # replicas
    shape, names = (world.world_size // size, size), ("replica", "shard")
    mesh = init_device_mesh("cpu", shape[not several :], mesh_dim_names=names[not several :])
    model: Any = Sharded().model().eval()
    for block in [*model.blocks, model]:
        divided: Any = fully_shard(block, mesh=mesh)
        divided.set_gradient_divide_factor(1.0)
        divided.set_force_sum_reduction_for_comms(True)
    return model


def fingerprint(tensors: list[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().full_tensor().contiguous().numpy().tobytes())
    return digest.hexdigest()


def all_bits(world: World) -> dict[str, str]:
    """Those of the first number of micro-batches by their names, and of the others by "NAME of NUMBER"."""
    others = {f"{way} of {count}": found for count in MORE for way, found in bits(world, count).items()}
    return bits(world, MICRO_BATCHES) | others


def bits(world: World, count: int) -> dict[str, str]:
    """The fingerprints of one step of so many micro-batches."""
    fix_arithmetic(True, False)
    ranks, rank, task = world.world_size, world.rank, Sharded()
    torch.manual_seed(0)
    model = task.model().eval()
    reduction = Sharding(model, None, [], task, world, "fp32", replica_of(world)).reduction
    reduction.begin_step([range(count)])
    for _ in range(-(-count // ranks)):
        own = reduction.round * ranks + rank
        number = own if own < count else 0
        (task.loss(model, batch(number)) / count).backward()
        if not reduction.is_last_round:
            reduction.accumulate(number)
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    found = {"gradients": fingerprint(gradients), "norm": clip_rows(gradients, 0.5).item().hex()}
    found["clipped"] = fingerprint(gradients)
    for way in ("foreach", "fused"):
        weights: list[Any] = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(weights, 1e-2, foreach=way == "foreach", fused=way == "fused")
        for step in range(20):  # fused kernels seldom differ
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient * (1 + step / 7)
            optimizer.step()
        found[f"control: {way}" if way == "fused" else way] = fingerprint(weights)
    return found | (usual(world, count) if count % ranks == 0 else {})


def usual(world: World, count: int) -> dict[str, str]:
    """The control: each rank adds up consecutive micro-batches, and the stock reduce-scatter the ranks."""
    model, each = stock(world), count // world.world_size
    for number in range(world.rank * each, (world.rank + 1) * each):
        (Sharded().loss(model, batch(number)) / count).backward()
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    total: Any = clip_grad_norm_(model.parameters(), 0.5)
    return {"control: gradients": fingerprint(gradients), "control: norm": total.full_tensor().item().hex()}


class Wire(TorchDispatchMode):
    """Counts what this rank sends to others: of a gather its part to each of them, of an exchange their rows.
    "replicas" is what goes to the ranks of other replicas."""

    def __init__(self, owners: Any) -> None:
        super().__init__()
        self.owners, self.sent = owners, {"weights": 0, "gradients": 0, "replicas": 0, "other": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, group = func.overloadpacket.__name__, dist.ProcessGroup.unbox(args[2])
            between = self.owners and group.group_name == self.owners.group_name
            if name == "_allgather_base_":
                self.sent["replicas" if between else "weights"] += args[1].nbytes * (group.size() - 1)
            elif name == "alltoall_base_":
                own = args[4][group.rank()] * args[1].element_size()
                self.sent["replicas" if between else "gradients"] += args[1].nbytes - own
            else:
                self.sent["other"] += 1
        return func(*args, **(kwargs or {}))


def formula(world: World, ranks: int, precision: str) -> dict[str, int]:
    """The same by docs/sharding.md, of a network whose rows are padded to a multiple of the ranks of a replica."""
    replicas, rest = world.world_size // ranks, MICRO_BATCHES % world.world_size
    numbers = sum(-(-len(p) // ranks) * ranks * p[0].numel() for p in Sharded().model().parameters())
    rounds = -(-MICRO_BATCHES // world.world_size)
    own = len(range(world.rank, MICRO_BATCHES, world.world_size))
    once, wide = numbers * (ranks - 1) // ranks, 2 if precision == "bf16" else 4
    # a replica without a micro-batch in the last round sends none then
    sums = rounds - (0 < rest <= world.rank // ranks * ranks)
    between = padded_blocks(ranks, replicas) * (replicas - 1) // replicas * (sums + 1) * 4
    return {"weights": 2 * rounds * once * wide, "gradients": own * once * 4, "replicas": between, "other": 0}


def padded_blocks(ranks: int, replicas: int) -> int:
    """Numbers of a rank's rows, each block's padded to a multiple of the replicas."""
    model: Any = Sharded().model()
    inner = {parameter: number for number, block in enumerate(model.blocks) for parameter in block.parameters()}
    of: dict[int, int] = {}
    for p in model.parameters():
        of[inner.get(p, -1)] = of.get(inner.get(p, -1), 0) + -(-len(p) // ranks) * p[0].numel()
    return sum(-(-numbers // replicas) * replicas for numbers in of.values())


def all_sent(world: World) -> list[Any]:
    """The same for each precision and rank."""
    return [each for precision in WHAT for each in sent(world, precision)]


def sent(world: World, precision: str) -> list[Any]:
    """What each rank sends in a step of so many micro-batches, counted and by the formula."""
    task, ranks = Sharded(), replica_of(world)
    torch.manual_seed(0)
    model = task.model()
    sharding = Sharding(model, None, [], task, world, precision, ranks)
    reduction = sharding.reduction
    reduction.begin_step([range(MICRO_BATCHES)])
    with Wire(sharding._owners) as wire:
        for _ in range(-(-MICRO_BATCHES // world.world_size)):
            own = reduction.present.start + world.rank
            number = own if own < MICRO_BATCHES else 0
            (task.loss(model, batch(number)) / MICRO_BATCHES).backward()
            reduction.accumulate(number)
    return world.all_gather({"counted": wire.sent, "formula": formula(world, ranks, precision)})


if __name__ == "__main__":
    rank_0_writes(all_bits if WHAT == ["bits"] else all_sent)

"""Gradients, norms and weights of a small network under FSDP2: ours, and in the usual way. Rank 0 writes fingerprints.

torchrun --nproc_per_node=W sharded_worker.py OUT.json MICRO_BATCHES [RANKS-OF-A-REPLICA]
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from sharded_task import LENGTH, VOCABULARY, Sharded
from steps import rank_0_writes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from evenkeel.distributed.world import World
from evenkeel.training.determinism import fix_arithmetic
from evenkeel.training.row_norm import clip_rows
from evenkeel.training.sharding import Sharding


def batch(number: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))


def sharded(world: World) -> tuple[Sharding, nn.Module]:
    """Ours."""
    torch.manual_seed(0)
    model = Sharded().model().eval()
    return Sharding(model, None, [], Sharded(), world, "fp32", replica_of(world)), model


def replica_of(world: World) -> int:
    return int(sys.argv[3]) if len(sys.argv) > 3 else world.world_size


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
    return model  # type: ignore[no-any-return]


def fingerprint(tensors: list[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().full_tensor().contiguous().numpy().tobytes())
    return digest.hexdigest()


def one_step(world: World) -> dict[str, str]:
    """The fingerprints of one step of so many micro-batches."""
    fix_arithmetic(True, False)
    micro_batches, ranks, rank, task = int(sys.argv[2]), world.world_size, world.rank, Sharded()
    sharding, model = sharded(world)
    reduction = sharding.reduction
    reduction.begin_step([range(micro_batches)])
    for _ in range(-(-micro_batches // ranks)):
        own = reduction.round * ranks + rank
        number = own if own < micro_batches else 0
        (task.loss(model, batch(number)) / micro_batches).backward()
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
    return found | (usual(world, micro_batches) if micro_batches % ranks == 0 else {})


def usual(world: World, micro_batches: int) -> dict[str, str]:
    """The control: each rank adds up consecutive micro-batches, and the stock reduce-scatter the ranks."""
    model, each = stock(world), micro_batches // world.world_size
    for number in range(world.rank * each, (world.rank + 1) * each):
        (Sharded().loss(model, batch(number)) / micro_batches).backward()
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    total: Any = clip_grad_norm_(model.parameters(), 0.5)
    return {"control: gradients": fingerprint(gradients), "control: norm": total.full_tensor().item().hex()}


if __name__ == "__main__":
    rank_0_writes(one_step)

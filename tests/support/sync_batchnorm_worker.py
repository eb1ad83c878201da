"""BatchNorm layers on some ranks with the statistics of all, against plain ones on one process with all samples.

Each rank but the last has a part of the samples; the last one is idle. Rank 0 writes relative distances as JSON.
"""

import contextlib

import torch
from steps import rank_0_writes
from torch import Tensor, nn

from evenkeel.data.plan import Plan, contiguous_part
from evenkeel.distributed.sync_batchnorm import BusyRanks, peers_of, synchronise
from evenkeel.distributed.world import World

SAMPLES, CHANNELS = 11, 5

CASES: dict[str, tuple[type[nn.Module], dict, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, {}, ()),
    "1d with a length": (nn.BatchNorm1d, {}, (6,)),
    "2d": (nn.BatchNorm2d, {}, (4, 3)),
    "2d, channels last": (nn.BatchNorm2d, {}, (4, 3)),
    "3d": (nn.BatchNorm3d, {}, (2, 3, 2)),
    "cumulative": (nn.BatchNorm1d, {"momentum": None}, ()),
    "not affine": (nn.BatchNorm2d, {"affine": False}, (4, 3)),
    "without statistics": (nn.BatchNorm2d, {"track_running_stats": False}, (4, 3)),
    "large mean": (nn.BatchNorm2d, {}, (4, 3)),
    "float64": (nn.BatchNorm2d, {}, (4, 3)),
    "bfloat16": (nn.BatchNorm2d, {}, (4, 3)),
}
with contextlib.suppress(ModuleNotFoundError):  # an optional task
    from evenkeel.tasks.segment import PooledNorm

    CASES["after pooling"] = (PooledNorm, {}, (1, 1))


def layer(name: str, dtype: torch.dtype) -> nn.Module:
    made, options, _ = CASES[name]
    torch.manual_seed(0)
    norm = made(CHANNELS, **options).to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def data(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, CHANNELS, *CASES[name][2])
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x = x * torch.arange(1, SAMPLES + 1).view(-1, *[1] * (x.dim() - 1)) + 1e4 * (name == "large mean")
    if name == "2d, channels last":
        x = x.to(memory_format=torch.channels_last)
    return x.to(dtype), weight


def results(norm: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Output and gradients of two passes, and the statistics after them."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    for _ in range(2):
        norm.zero_grad()
        x.grad = None
        out = norm(x)
        (out * weight).sum().backward()
    assert x.grad is not None
    parts = {"out": out.detach(), "gradient of x": x.grad}
    parts |= {f"gradient of {n}": p.grad for n, p in norm.named_parameters() if p.grad is not None}
    return parts | {n: b.clone() for n, b in norm.named_buffers()}


def distance(got: Tensor, expected: Tensor) -> float:
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / max(float(expected.norm()), 1e-12))


def case(name: str, world: World, peers: BusyRanks) -> dict[str, float]:
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(name, torch.float32)
    x, weight = data(name, dtype)
    # what is right: everything in float64 on one process, from the same numbers
    expected = results(layer(name, torch.float64), x.double(), weight)
    norm = layer(name, torch.float64 if name == "float64" else torch.float32)
    synchronised = layer_of(norm, peers)
    got: dict[str, Tensor] = {}
    if world.rank < peers.count:
        mine = contiguous_part(SAMPLES, world.rank, peers.count)
        got = results(synchronised, x[mine.start : mine.stop], weight[mine.start : mine.stop])
    everyone = [part for part in world.all_gather(got) if part]
    whole = {
        key: torch.cat([part[key] for part in everyone])
        if key in ("out", "gradient of x")
        else torch.stack([part[key].double() for part in everyone]).sum(0) / (1 if "gradient" in key else len(everyone))
        for key in everyone[0]
    }
    assert all(torch.equal(part[k], everyone[0][k]) for part in everyone for k in part if "running" in k)
    return {key: distance(whole[key], expected[key]) for key in whole}


def layer_of(norm: nn.Module, peers: BusyRanks) -> nn.Module:
    """The layer, with the peers that are connected already."""
    synchronise(norm, Plan(1, 1, 1, 1), World(0, 0, 1, 1, torch.device("cpu"), launched=False))
    mine = norm
    mine.peers = peers
    assert peers_of(norm) is peers
    return norm


def found(world: World) -> dict[str, dict[str, float]]:
    count, peers = world.world_size - 1, BusyRanks()
    peers.connect([count, 1])
    peers.select(count)
    return {name: case(name, world, peers) for name in CASES}


if __name__ == "__main__":
    rank_0_writes(found)

"""Checks of all ranks together: results and speed of collectives, clocks, devices, slow ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...common.naming import name_ranks
from ...distributed.world import World
from .findings import Finding, judged

PAYLOAD = 4 << 20
"""Elements of float32 in a timed collective: 16 MiB, somewhat less than a bucket of DDP (25 MiB)."""

CLOCK_WARNS, CLOCK_FAILS = 0.5, 2.0
"""Seconds between two clocks. torchrun's heartbeats have the sender's time; a node is lost after 5 s without one."""

SLOW = 0.5
"""Share of the median speed below which a rank is an outlier: all ranks wait for it in each step."""


def connect(world: World, store: Store, seconds: float) -> list[Finding]:
    """Make the process group that training would have."""
    limit = timedelta(seconds=seconds)
    group = PrefixStore("group", store)
    with _stdout_to_stderr():
        dist.init_process_group(world.backend, store=group, rank=world.rank, world_size=world.world_size, timeout=limit)
    return [judged("process group", f"{world.backend}, {world.world_size} ranks")]


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Because gloo of some torch versions prints on stdout that it is connected, which breaks --json."""
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def collectives(world: World) -> Iterator[Finding]:
    """all-reduce, all-to-all and broadcast: each once to check it, then three times to time it."""
    ranks, rank, device = world.world_size, world.rank, world.device
    each = -(-PAYLOAD // ranks)
    size = each * ranks * 4
    ones, others = torch.ones(each * ranks, device=device), torch.arange(ranks, device=device)
    sent, received = ((it * 1.0).repeat_interleave(each) for it in (rank * ranks + others, others * ranks + rank))
    checks: dict[str, tuple[Callable[[Tensor], object], Tensor, Tensor]] = {  # the call, its input, the expected output
        "all-reduce": (dist.all_reduce, ones * (rank + 1), ones * ranks * (ranks + 1) / 2),
        "all-to-all": (lambda got: dist.all_to_all_single(got, sent), ones * -1, received),
        "broadcast": (lambda it: dist.broadcast(it, src=ranks - 1), ones * rank, ones * (ranks - 1)),
    }
    for name, (call, given, wanted) in checks.items():
        right, spent = True, 0.0
        for number in range(4):
            tensor = given.clone()
            dist.all_reduce(torch.zeros(1))  # start together
            start = time.perf_counter()
            call(tensor)
            right = torch.equal(tensor, wanted) and right
            spent += (time.perf_counter() - start) / 3 * (number > 0)
        all_right = world.all_gather(right)
        if rank == 0:
            wrong = [number for number, it in enumerate(all_right) if not it]
            value = f"right, {size / 2**20:.0f} MiB in {spent * 1000:.0f} ms, {size / spent / 1e9:.2f} GB/s"
            value = f"wrong numbers on {name_ranks(wrong)}" if wrong else value
            again = "NCCL_P2P_DISABLE=1 NCCL_DEBUG=INFO torchrun ... -m evenkeel doctor"
            yield judged(name, value, "the right sum or copy", again, fail=wrong)


def clocks(world: World) -> Iterator[Finding]:
    """How far the clocks of the ranks are apart: the smallest difference of five readings for each rank."""
    apart = [0.0] * world.world_size
    for reading in range(5):
        dist.all_reduce(torch.zeros(1))
        times = world.all_gather(time.time())
        found = [it - times[0] for it in times]
        apart = [b if not reading or abs(b) < abs(a) else a for a, b in zip(apart, found, strict=True)]
    if world.rank == 0:
        yield judge_clocks(apart)


def judge_clocks(apart: Sequence[float]) -> Finding:
    """From each rank's difference to rank 0, in seconds."""
    most = max(apart) - min(apart)
    off = [rank for rank, it in enumerate(apart) if abs(it) > CLOCK_WARNS]
    return judged(
        "clocks",
        f"{most:.1f} s apart"
        + (f"; against rank 0 {name_ranks(off)} by up to {max(apart, key=abs):+.1f} s" if off else ""),
        f"{CLOCK_WARNS:g} s at most: torchrun decides by the time in heartbeats whether a node is lost",
        "sudo chronyc makestep    # or: sudo timedatectl set-ntp true",
        warn=most > CLOCK_WARNS,
        fail=most > CLOCK_FAILS,
    )


def claims(world: World) -> Iterator[Finding]:
    """Whether two ranks compute on one GPU, as two torchruns on a node do."""
    name = ""
    if world.device.type == "cuda":
        known: Any = torch.cuda.get_device_properties(world.device)
        name = str(getattr(known, "uuid", "")) or f"{socket.gethostname()} {world.device}"
    claimed = world.all_gather(name)
    if world.rank == 0 and any(claimed):
        yield judge_claims(claimed, world.shares_gpu)


def judge_claims(devices: Sequence[str], allowed: bool = False) -> Finding:
    """From the device of each rank; empty is a CPU, which ranks may share, as they may a GPU if it is `allowed`."""
    owners: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        owners.setdefault(device, []).append(rank)
    twice = {device: ranks for device, ranks in owners.items() if device and len(ranks) > 1}
    return judged(
        "devices of ranks",
        "; ".join(f"{name_ranks(ranks)} on one device, {device}" for device, ranks in twice.items())
        or "each rank has its own",
        "a device for each rank: "
        + ("sharing it is slow, by gloo" if allowed else "one torchrun on a node, or other GPUs for the second"),
        "leave --share-gpu out where each rank has a GPU"
        if allowed
        else "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 ...    # and 2,3 for the second",
        fail=twice and not allowed,
        warn=twice,
    )


def speeds(world: World) -> Iterator[Finding]:
    """Matrix products and copies in memory on every rank at the same time, with the slow ranks named."""
    if world.launched:
        dist.all_reduce(torch.zeros(1))
    rows = world.all_gather((socket.gethostname(), products(world.device), copies(world.device)))
    hosts, *measured = zip(*rows, strict=True)
    if world.rank == 0:
        yield judge_speeds("matrix products", "GFLOP/s", measured[0], hosts)
        yield judge_speeds("memory copies", "GB/s", measured[1], hosts)


def judge_speeds(name: str, unit: str, values: Sequence[float], hosts: Sequence[str]) -> Finding:
    """From the speed and the host of each rank."""
    median, low = statistics.median_high(values), values.index(min(values))
    slow = [rank for rank, it in enumerate(values) if it < SLOW * median]
    where = ", ".join(sorted({hosts[rank] for rank in slow}))
    lowest = f"median {median:.3g} {unit}, lowest {values[low]:.3g} (rank {low})"
    return judged(
        name,
        lowest if len(values) > 1 else f"{median:.3g} {unit}",
        f"at least {SLOW:.0%} of the median; slow: {name_ranks(slow)} on {where}" if slow else "",
        f"ssh {hosts[low]} 'top -b -n 1 | head -n 20; nvidia-smi -q -d PERFORMANCE,TEMPERATURE'",
        warn=slow,
    )


def products(device: torch.device) -> float:
    """GFLOP/s of matrix products in float32, over 0.3 s."""
    size = 4096 if device.type == "cuda" else 384
    a = torch.rand(size, size, device=device)
    return _per_second(lambda: a @ a, device) * 2 * size**3 / 1e9


def copies(device: torch.device) -> float:
    """GB/s from host memory to the device; within the memory on a CPU."""
    source = torch.rand(4 << 20)
    target = torch.empty(4 << 20, device=device)
    return _per_second(lambda: target.copy_(source), device) * source.nbytes / 1e9


def _per_second(work: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    finish()
    start, done = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        work()
        finish()
        done += 1
    return done / (time.perf_counter() - start)

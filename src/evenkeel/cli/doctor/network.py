"""Names, addresses and ports between the nodes; the store, in which the ranks collect their findings."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ...common.errors import Refusal
from ...common.network import find_link, interfaces, is_loopback, meet, why_unreachable
from ...distributed.rendezvous import fresh_store, job_store
from ...distributed.world import World
from .findings import Finding, Level, Report, judged

HEARD = 5.0
"""Maximum seconds that rank 0 waits until all others have read its verdict."""

SLOW_STORE = 50.0
"""Milliseconds of a round trip. All ranks pass through the store at the start, and while they wait for each other."""


def addresses(name: str) -> list[str]:
    """The addresses of a host name on this node."""
    try:
        return sorted({str(it[4][0]) for it in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _outside() -> tuple[str, str]:
    """An interface of this node that others can reach, and its address."""
    found = {name: address for name, address in interfaces().items() if not is_loopback(address)}
    return next(iter(found.items()), ("INTERFACE", "ADDRESS"))


def host_name(nodes: int) -> Iterator[Finding]:
    """gloo binds to the address of this host's name, unless GLOO_SOCKET_IFNAME names an interface."""
    name, chosen = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
    mine = addresses(name)
    wrong = not mine or (nodes > 1 and any(map(is_loopback, mine)))
    interface, _ = _outside()
    yield judged(
        "host name",
        f"{name} is {', '.join(mine) or 'not known'}" + (f", and GLOO_SOCKET_IFNAME={chosen}" if chosen else ""),
        "an address that the other nodes reach: gloo binds to it",
        f"export GLOO_SOCKET_IFNAME={interface}    # the launchers set it",
        fail=wrong and not chosen and nodes > 1,
        warn=wrong and not chosen,
    )


def master(host: str, port: int, nodes: int) -> Iterator[Finding]:
    """The address of node 0 as this node sees it, and the interface that leads there."""
    name, found, shown = "address of node 0", addresses(host), f"{host}:{port}"
    loopback = nodes > 1 and any(map(is_loopback, found))
    if loopback or not found:
        # with the address of this node, which is node 0 where the name leads to itself
        value = f"{shown} is {', '.join(found) or 'not known'} here"
        remedy = f"launch/multi_node.py --master {_outside()[1] if loopback else 'ADDRESS'} ..."
        remedy += "    # or, on node 0: torchrun --local-addr ADDRESS ..."
        yield Finding("FAIL", name, value, "an address by which all nodes reach node 0", remedy)
        return
    try:
        link = find_link(host, port, is_master=False)
    except Refusal as refusal:
        yield Finding("FAIL", name, f"{shown}: {refusal}", "a route to it", f"ip route get {found[0]}")
        return
    yield judged(name, f"{shown}, by {link.interface or 'an unnamed interface'} as {link.address}")


def free_port(host: str, port: int, needed: bool = True) -> Iterator[Finding]:
    """Whether node 0 can listen; from another node, whether something answers. Before a job, so without torchrun.

    Args:
        host: of node 0.
        port: where it will listen.
        needed: whether somebody has asked for this port; if not, it is only a warning.
    """
    try:
        with socket.create_server((host, 0)):
            pass
    except OSError:  # not an address of this node
        reason = why_unreachable(host, port, 0, "asking node 0")
        yield judged("port", f"{port} of {host} " + (f"does not answer yet ({reason})" if reason else "answers"))
        return
    try:
        meet(host, port, is_master=True, patience=0)
    except Refusal as refusal:
        taken = str(refusal).partition(";")[0].removeprefix("--master: ")
        remedy = f"ss -ltnp 'sport = :{port}'    # or choose another: --master {host}:{port + 1}"
        yield judged("port", taken, f"port {port} is free", remedy, warn=True, fail=needed)
    else:
        yield judged("port", f"{port} is free")


def join(world: World, seconds: float) -> Store:
    """Meet all ranks in the job's store. Raises `EndedHere`, which says who is missing."""
    limit = timedelta(seconds=seconds)
    return fresh_store(job_store(world.rank, world.world_size, limit), world.rank, world.world_size, limit)


def round_trip(store: Store, rank: int) -> Iterator[Finding]:
    """How long the store takes for a value that is written and read."""
    start, rounds = time.perf_counter(), 20
    for number in range(rounds):
        store.set(f"trip/{rank}", str(number))
        if (got := store.get(f"trip/{rank}")) != str(number).encode():
            raise ValueError(f"the store gives {got!r}, and {number} was written")
    spent = (time.perf_counter() - start) / rounds * 1000
    near = f"under {SLOW_STORE:g} ms"
    value = near if spent < SLOW_STORE else f"{spent:.0f} ms"
    ping = f"ping {os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}"
    yield judged("store", f"a round trip takes {value}", near, ping, warn=spent >= SLOW_STORE)


def collect(store: Any, world: World, own: Report, seconds: float) -> list[Report]:
    """All ranks' findings on rank 0; ranks that send none within the time are a failure."""
    store.set(f"report/{own.rank}", pickle.dumps(own))
    if world.rank:
        return []
    deadline, reports, silent = time.monotonic() + seconds, list[Report](), list[int]()
    for rank in range(world.world_size):
        while not (there := store.check([f"report/{rank}"])) and time.monotonic() < deadline:
            time.sleep(0.02)
        if there:
            reports.append(pickle.loads(store.get(f"report/{rank}")))  # noqa: S301  (this job's ranks)
        else:
            silent.append(rank)
    if silent:
        value = f"nothing from {', '.join(map(str, silent))} within {seconds:g} s"
        missing = Finding("FAIL", "ranks", value, "findings of every rank", "py-spy dump --pid PID_OF_THE_RANK")
        reports[0].findings.append(missing)
    return reports


def verdict(store: Any, world: World, level: Level, seconds: float) -> Level:
    """Rank 0's verdict on all ranks; without an answer FAIL. Rank 0, which may hold the store, leaves last."""
    try:
        if world.rank == 0:
            store.set("verdict", level)
            until = time.monotonic() + HEARD
            while store.add("heard", 0) < world.world_size - 1 and time.monotonic() < until:
                time.sleep(0.02)
        else:
            store.wait(["verdict"], timedelta(seconds=seconds))
            level = cast("Level", store.get("verdict").decode())
            with contextlib.suppress(DistError):
                store.add("heard", 1)
    except DistError:
        return "FAIL"
    return level

"""A rendezvous that survives restarts under a plain ``torchrun``.

torchrun's agents keep one store over all restarts of a job, and `init_process_group` writes the addresses of its ranks
under the same keys each time, so a restarted worker may read the address of a dead one (pytorch issues 135712 and
167288). The workers of an attempt must agree on a new namespace, but nothing in their environment names one: agents
count restarts separately, and a change of membership is not counted. So they agree by a roll-call in that very store:

1. *call*: rank 0 writes a random nonce under a fixed key, over whatever is there.
2. *here*: each other rank answers every call that it sees, by writing a random name under ``NONCE/here/RANK``.
3. *go*: when all ranks have answered, rank 0 writes ``NONCE/go/NAME`` for each name, all in one request. A rank that
   finds its own name may use the namespace. The ranks that met under one nonce are a *generation*.

A node that refuses its input writes the line over the call, and all others end with it.

No dead attempt has written below the nonce, because only a rank that has read the call can. A rank that finds its go
knows that rank 0 was alive after it came; the call of a dead rank 0 gets answers but never a go. One name is let in for
each rank, all or none. Each world size has its own fixed key, so attempts of different sizes never meet.

- A worker may answer and die while rank 0 waits for a third one, and its successor's answer may come too late. So a
  call that took long to fill is repeated, and go is given only for recent answers. A worker that dies after that has
  died in training: `init_process_group` fails, and the agents restart everyone.
- Of two rank 0s alive at once the later call stands; the earlier rank 0 sees it and fails.
- A worker whose agent was killed sees that it has lost its parent, and fails, or it would answer for its successor.
- Two live workers can have one rank only if an agent is cut off from its job. The last to answer is let in.

What slips through these windows leaves a rank waiting until it times out, and its agent restarts the job: a delay, but
never two attempts mixed. Waiting is by polling, because a `Store.wait` that times out prints warnings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..common import keeper_link
from ..common.errors import EndedHere, Refusal
from ..common.network import Waiting, why_unreachable
from ..common.processes import under_torchrun

REFUSED_BY = "refused by rank "
"""Prefix of the value that replaces a call if another node has refused the job's input."""

DIED = "died"
"""The key by which a keeper reports to its generation that its rank has died."""

DO_NOT_WAIT = "do_not_wait"
"""The key that tells keepers not to wait for all ranks: one has no keeper, or ends for good."""

ANSWER_TIMEOUT = 1.0
"""Seconds in which all ranks must answer a call, or it is repeated. Doubled each time for slow stores."""


def job_store(rank: int, world_size: int, timeout: timedelta, connect_limit: float | None = None) -> Store:
    """Connect to the job's store at MASTER_ADDR and MASTER_PORT, and report the waiting.

    torch's own `env://` gives the same store, but there rank 0 waits for all others without knowing which are missing.

    Args:
        rank: this worker's rank.
        world_size: the number of ranks.
        timeout: for the store's operations.
        connect_limit: seconds to wait for the store; None: `timeout`.

    Raises:
        EndedHere: it did not appear.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    on_this_host = rank == 0 and not agent_hosts_store()  # in this process, or beside its keeper
    serves = on_this_host and keeper_link.STORE not in os.environ
    who, where = f"rank {rank} of {world_size}", f"MASTER_ADDR={host} MASTER_PORT={port}"
    # a node may not find itself by the name that the others use; and in a container without DNS torch, which looks up
    # who is at the other end, takes ten seconds for localhost
    name = "localhost" if serves or (on_this_host and why_unreachable(host, port, 2.0, who)) else host
    if not serves:
        seconds = timeout.total_seconds() if connect_limit is None else connect_limit
        if reason := why_unreachable(name, port, seconds, f"{who} waits for rank 0 at {where}"):
            remedy = "start rank 0 on that host, and every rank with the same two values"
            raise EndedHere(f"{who}: no answer at {where} for {seconds:g} s ({reason}); {remedy}")
    return TCPStore(name, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=serves)


def agent_hosts_store() -> bool:
    """Whether a torchrun agent hosts the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_served(store: Store) -> bool:
    """Whether something listens at the address of a store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return not (isinstance(store, TCPStore) and why_unreachable(store.host, store.port, 0.0, ""))


def namespace_of(store: Store, world_size: int) -> Store:
    """The part of the job's store in which these ranks meet."""
    return PrefixStore(f"evenkeel/rendezvous/{world_size}", store)


def refusal_in(namespace: Store) -> str:
    """Another node's refusal; empty if there is none."""
    call = namespace.get("call").decode() if namespace.check(["call"]) else ""
    return call if call.startswith(REFUSED_BY) else ""


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Agree with all other ranks on a namespace that no earlier attempt has used.

    Every rank of the attempt calls this once, before ``init_process_group(store=...)``. It takes some 20 ms, or half a
    second on 1,024 ranks.

    Args:
        store: of :func:`job_store`. It may hold keys of dead attempts and be in use by stale workers.
        rank: this worker's rank.
        world_size: the number of ranks of this attempt.
        timeout: how far apart the ranks may start.

    Returns:
        A view of `store` under a prefix that only the ranks of this attempt have.

    Raises:
        EndedHere: ranks did not answer in time. Rank 0 names them; the others can only name rank 0.
        Refusal: another node has refused the job's input (:func:`refusals.refuse_together`).
        RuntimeError: this worker's attempt is over: another rank 0 has called since, or its agent has died.
    """
    namespace = namespace_of(store, world_size)
    nonce = _call(namespace, world_size, timeout) if rank == 0 else _answer(namespace, rank, world_size, timeout)
    return generation_store(store, world_size, nonce)


def generation_store(store: Store, world_size: int, nonce: str) -> Store:
    """The part of a job's store for the ranks that met under this nonce."""
    return PrefixStore(nonce, namespace_of(store, world_size))


def _call(namespace: Store, world_size: int, timeout: timedelta) -> str:
    """Rank 0's part; returns the nonce that all ranks have answered."""
    answer_timeout, waiting = ANSWER_TIMEOUT, Waiting()
    nonce, here, called = _new_call(namespace, world_size)
    for _ in _polls(world_size, timeout):
        waiting.say(lambda: _describe(namespace, here))  # noqa: B023  (it is called at once)
        if namespace.get("call").decode() != nonce:
            if refused := refusal_in(namespace):
                raise Refusal(refused)
            raise RuntimeError("another rank 0 has called the ranks since: the attempt of this one is over")
        if not namespace.check(here):
            continue
        if time.monotonic() - called <= answer_timeout:
            names = [name.decode() for name in namespace.multi_get(here)]
            go = [f"{nonce}/go/{name}" for name in names]
            cast("Any", namespace).multi_set(go, [""] * len(names))  # not in the stub
            return nonce
        answer_timeout *= 2
        nonce, here, called = _new_call(namespace, world_size)
    raise EndedHere(
        f"{_describe(namespace, here)}; gave up after {timeout.total_seconds():g} s; see their logs; if they are only "
        "slow to start, raise --hang-timeout"
    )


def _describe(namespace: Store, here: list[str]) -> str:
    """Which ranks have answered the call."""
    missing = [rank for rank, key in enumerate(here, start=1) if not namespace.check([key])]
    size = len(here) + 1
    where = " ".join(f"{name}={os.environ.get(name, '')}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    names = f"{', '.join(map(str, missing[:20]))}{', ...' * (len(missing) > 20)}"
    here_now = f"{size - len(missing)} of {size} ranks are here"
    return f"rank 0 at {where}: {here_now}; waiting for {names or 'all to answer together'}"


def _new_call(namespace: Store, world_size: int) -> tuple[str, list[str], float]:
    if refused := refusal_in(namespace):
        raise Refusal(refused)
    nonce = uuid4().hex
    keeper_link.send("generation", nonce)  # first: if this rank dies, its keeper must reach those who read it
    namespace.set("call", nonce)
    return nonce, [f"{nonce}/here/{rank}" for rank in range(1, world_size)], time.monotonic()


def _answer(namespace: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Every other rank's part; returns the nonce under which rank 0 has let this worker in."""
    name, nonce, waiting = uuid4().hex, "", Waiting()
    for _ in _polls(world_size, timeout):
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of this node wait for the same
            what = f"rank {rank} of {world_size} waits for rank 0{', which waits for others' if nonce else ''}"
            waiting.say(lambda: what)  # noqa: B023
        # check for a new call first: a go under the old one would be from a dead rank 0
        if namespace.check(["call"]) and (call := namespace.get("call").decode()) != nonce:
            if call.startswith(REFUSED_BY):
                raise Refusal(call)
            if namespace.check([f"{call}/{DIED}"]):
                continue  # the ranks that answered it are leaving
            nonce = call
            keeper_link.send("generation", nonce)
            namespace.set(f"{nonce}/here/{rank}", name)
        if nonce and namespace.check([f"{nonce}/go/{name}"]):
            return nonce
    raise EndedHere(
        f"rank {rank} of {world_size}: no answer within {timeout.total_seconds():g} s from rank 0. "
        "Either it is missing, or it waits for other ranks, which its own error names"
    )


def _polls(world_size: int, timeout: timedelta) -> Iterator[None]:
    """Yield until the time is up, 100 times a second, or some 5,000 times over all ranks of a large world."""
    parent = os.getppid()
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        yield
        if os.getppid() != parent and under_torchrun():
            raise RuntimeError("the torchrun agent of this worker has died: the worker's attempt is over")
        time.sleep(max(0.01, world_size / 5000))

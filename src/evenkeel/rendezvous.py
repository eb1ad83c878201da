"""A rendezvous that survives restarts under a plain ``torchrun``.

The problem. torchrun's agents keep one store alive over all restarts of a job, and `init_process_group`
writes the addresses of its ranks into it under the same keys each time. A restarted worker may then read
the address of a dead one (pytorch issues 135712 and 167288). So the workers of an attempt must agree on a
namespace that no earlier attempt has used. Nothing in their environment names one: each agent keeps a restart
count of its own, and a membership change restarts workers without raising it. They have to agree through
the very store that is full of the keys of the dead.

The protocol is a roll-call.

1. *call*: rank 0 draws a nonce and writes it under a fixed key, over whatever stands there.
2. *here*: each other rank has drawn a name. It reads the call and writes its name under ``NONCE/here/RANK``.
   It goes on reading, and answers every new call that it sees.
3. *go*: when all ranks have answered, rank 0 reads their names and writes a ``NONCE/go/NAME`` for each, all
   in one request. A rank that finds its own may use the namespace.

Why it is right. Only a process that has read the call can write below its nonce, so no dead attempt has.
A rank that finds its go knows that rank 0 was alive after it came, since rank 0 has read its name; the call
of a dead rank 0 gets an answer too, but never a go. One name is let in for each rank, and all or none. Each
world size has a fixed key of its own, so attempts of different sizes do not even meet.

The dead and the doubles:

- A worker may answer and die, and its agent start another while rank 0 still waits for a third. The later
  answer overwrites the earlier, but might come too late. So a call that took long to fill is repeated, and go
  is given only for answers of the last moments. A worker that dies after those has died in training, as it
  were: `init_process_group` fails, and the agents restart everyone.
- Of two rank 0s alive at once the later call stands; the earlier sees it and fails.
- A worker whose agent was killed would go on answering in the place of its successor. It sees that it has
  lost its parent, and fails.
- Two live workers of one rank are left only where an agent is cut off from its job. (With the c10d
  rendezvous no worker starts before all agents taking part have killed their old ones.) The last to
  answer is let in.

What slips through the windows that remain leaves a rank waiting in vain. It times out, and its agent
restarts the job: a delay, but never two attempts mixed.

Waiting is by polling: a `Store.wait` that times out prints warnings, and asks the DNS for a name in each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

from torch.distributed import DistError, is_torchelastic_launched
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from .errors import NODES_REFUSE, EndedHere, Refusal
from .network import Waiting, reach

log = logging.getLogger(__name__)

_REFUSED = "refused by rank "
"""So begins what stands in the place of a call if the job's input is refused on another node."""

PATIENCE = 1.0
"""Seconds in which a call must fill, or its answers count as old and it is repeated. Doubled for each repeat,
so that a store too slow for it delays the job but cannot stop it."""


def job_store(rank: int, world_size: int, timeout: timedelta, patience: float | None = None) -> Store:
    """The store of the job at MASTER_ADDR and MASTER_PORT, which nobody awaits in silence.

    torch's own `env://` makes the same, but rank 0 waits in it for all others without knowing who is missing.

    Args:
        rank: this worker's rank.
        world_size: the number of ranks.
        timeout: for what is asked of the store.
        patience: seconds that it may take to appear; None: as long as `timeout`.

    Raises:
        EndedHere: it has not appeared.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # rank 0 need not find itself by the name that the others use
    hosts = rank == 0 and not _agent_hosts()
    if not hosts:
        who, where = f"rank {rank} of {world_size}", f"MASTER_ADDR={host} MASTER_PORT={port}"
        seconds = timeout.total_seconds() if patience is None else patience
        if reason := reach(host, port, seconds, f"{who} waits for rank 0 at {where}"):
            remedy = "start rank 0 on that host, and every rank with the same two values"
            raise EndedHere(f"{who}: no answer at {where} for {seconds:g} s ({reason}); {remedy}")
    name = "localhost" if hosts else host
    store: Store = TCPStore(
        name, port, is_master=hosts, timeout=timeout, wait_for_workers=False, multi_tenant=hosts
    )  # typed, because torch's stub of it is not
    return store


def _agent_hosts() -> bool:
    """Whether the store is one of torchrun's agents', and not of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def refuse_together(text: str) -> None:
    """Have the other nodes refuse as well, which would wait for the ranks of this one, and wait until they do.

    For one rank of each node, under torchrun. The node that has the store leaves last.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # a store of rank 0 may come later, but one of an agent that is not there has been
    patience = 0 if _agent_hosts() else NODES_REFUSE
    with contextlib.suppress(EndedHere, DistError):
        room = _room(job_store(rank, world_size, timedelta(seconds=NODES_REFUSE), patience), world_size)
        room.add("refused", 1)
        deadline = time.monotonic() + NODES_REFUSE
        while time.monotonic() < deadline:
            if not _refused(room):  # nor overwritten by a rank 0 that has just called
                room.set("call", f"{_REFUSED}{rank}: {text}")
            if room.add("refused", 0) >= int(os.environ["GROUP_WORLD_SIZE"]):
                break
            time.sleep(0.02)
    if os.environ["GROUP_RANK"] == "0":
        time.sleep(0.1)


def _room(store: Store, world_size: int) -> Store:
    return PrefixStore(f"evenkeel/rendezvous/{world_size}", store)


def _refused(room: Store) -> str:
    """What another node has refused, if it has."""
    call = room.get("call").decode() if room.check(["call"]) else ""
    return call if call.startswith(_REFUSED) else ""


def fresh_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Agree with all other ranks on a namespace that no earlier attempt has used.

    Every rank of the attempt calls this once, before ``init_process_group(store=...)``. It works the same in
    a store that is fresh anyway, and costs some 20 ms, or half a second on 1,024 ranks.

    Args:
        store: the job's store, as :func:`job_store` gives it. It may hold keys of dead attempts and be in use by stale
            workers.
        rank: this worker's rank.
        world_size: the number of ranks of this attempt.
        timeout: how long to wait for the other ranks; they may start as far apart as this.

    Returns:
        A view of `store` under a prefix that is the same on all ranks of this attempt and on no others.

    Raises:
        EndedHere: ranks did not answer in time. Rank 0 names them; the others can only name rank 0.
        Refusal: another node has refused the job's input (:func:`refuse_together`).
        RuntimeError: this worker's attempt is over: another rank 0 has called since, or its agent has died.
    """
    room = _room(store, world_size)
    start = time.monotonic()
    nonce = _call(room, world_size, timeout) if rank == 0 else _answer(room, rank, world_size, timeout)
    log.debug("rank %d of %d: namespace %s after %.3f s", rank, world_size, nonce, time.monotonic() - start)
    return PrefixStore(nonce, room)


def _call(room: Store, world_size: int, timeout: timedelta) -> str:
    """Rank 0's part: the nonce that all ranks have answered."""
    patience, waiting = PATIENCE, Waiting()
    nonce, here, called = _new_call(room, world_size)
    for _ in _polls(world_size, timeout):
        waiting.tell(lambda: _describe(room, here))  # noqa: B023  (it is called at once)
        if room.get("call").decode() != nonce:
            if refused := _refused(room):
                raise Refusal(refused)
            raise RuntimeError("another rank 0 has called the ranks since: the attempt of this one is over")
        if not room.check(here):
            continue
        if time.monotonic() - called <= patience:
            names = [name.decode() for name in room.multi_get(here)]
            # torch's stub of Store lacks multi_set, which its own agent uses.
            cast("Any", room).multi_set([f"{nonce}/go/{name}" for name in names], [""] * len(names))
            return nonce
        patience *= 2
        nonce, here, called = _new_call(room, world_size)
    raise EndedHere(
        f"{_describe(room, here)}, in vain for {timeout.total_seconds():g} s; see their logs; if they are only slow to "
        "start, raise --hang-timeout"
    )


def _describe(room: Store, here: list[str]) -> str:
    """Who has come to the roll-call, and who has not."""
    missing = [rank for rank, key in enumerate(here, start=1) if not room.check([key])]
    size = len(here) + 1
    where = " ".join(f"{name}={os.environ.get(name, '')}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    names = f"{', '.join(map(str, missing[:20]))}{', ...' * (len(missing) > 20)}"
    here_now = f"{size - len(missing)} of {size} ranks are here"
    return f"rank 0 at {where}: {here_now}; waiting for {names or 'all to answer together'}"


def _new_call(room: Store, world_size: int) -> tuple[str, list[str], float]:
    if refused := _refused(room):
        raise Refusal(refused)
    nonce = uuid4().hex
    room.set("call", nonce)
    return nonce, [f"{nonce}/here/{rank}" for rank in range(1, world_size)], time.monotonic()


def _answer(room: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Every other rank's part: the nonce under which rank 0 has let this worker in."""
    name, nonce, waiting = uuid4().hex, "", Waiting()
    for _ in _polls(world_size, timeout):
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of this node wait for the same
            what = f"rank {rank} of {world_size} waits for rank 0{', which waits for others' if nonce else ''}"
            waiting.tell(lambda: what)  # noqa: B023
        # The call first: once there is a new one, a go under the old one leads to a rank 0 that is gone.
        if room.check(["call"]) and (call := room.get("call").decode()) != nonce:
            if call.startswith(_REFUSED):
                raise Refusal(call)
            nonce = call
            room.set(f"{nonce}/here/{rank}", name)
        if nonce and room.check([f"{nonce}/go/{name}"]):
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
        if os.getppid() != parent and is_torchelastic_launched():
            raise RuntimeError("the torchrun agent of this worker has died: the worker's attempt is over")
        time.sleep(max(0.01, world_size / 5000))

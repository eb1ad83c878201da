"""A node that refuses its input makes the other nodes refuse as well: the line stands in place of rank 0's call."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

from torch.distributed import DistError

from ..common.errors import REFUSAL_TIMEOUT, EndedHere
from .rendezvous import REFUSED_BY, agent_hosts_store, job_store, namespace_of, refusal_in


def refuse_together(text: str) -> None:
    """Make the other nodes, which would wait for this one, refuse as well, and wait until they do.

    One rank of each node calls it, under torchrun.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # rank 0's store may still come; an agent's that is not there is gone
    limit = 0 if agent_hosts_store() else REFUSAL_TIMEOUT
    with contextlib.suppress(EndedHere, DistError):
        namespace = namespace_of(job_store(rank, world_size, timedelta(seconds=REFUSAL_TIMEOUT), limit), world_size)
        namespace.add("refused", 1)
        deadline = time.monotonic() + REFUSAL_TIMEOUT
        while time.monotonic() < deadline:
            if not refusal_in(namespace):  # repeated in case a new call of rank 0 has overwritten it
                namespace.set("call", f"{REFUSED_BY}{rank}: {text}")
            if namespace.add("refused", 0) >= int(os.environ["GROUP_WORLD_SIZE"]):
                break
            time.sleep(0.02)
    if os.environ["GROUP_RANK"] == "0":
        time.sleep(0.1)  # the node that has the store leaves last

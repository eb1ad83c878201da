"""Which job may write to a store."""

from __future__ import annotations

import json
import threading
import time

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.mirror import lease
from evenkeel.mirror.lease import NAME, Lease
from evenkeel.mirror.store import Store
from tests.support.s3 import port, store  # noqa: F401  (fixtures)


def test_a_second_job_is_refused_while_the_first_renews_and_may_come_after_its_death(store: Store) -> None:
    first, second = Lease(store, "a"), Lease(store, "b")
    first.acquire()
    over = threading.Event()

    def live() -> None:
        while not over.wait(lease.RENEWED):
            first.renew()

    (alive := threading.Thread(target=live)).start()
    with pytest.raises(Refusal, match=r"--mirror s3://\S+: a job on \S+ writes there; name another URL"):
        second.acquire()
    over.set()
    alive.join()
    second.acquire()
    assert second.mine
    with pytest.raises(Refusal):
        first.renew()
    assert not first.mine
    first.release()
    assert json.loads(store.read(NAME) or b"")["run"] == "b"


def test_a_restart_of_the_same_job_does_not_wait(store: Store) -> None:
    Lease(store, "a").acquire()
    began = time.monotonic()
    Lease(store, "a").acquire()
    assert time.monotonic() - began < lease.PATIENCE


def test_of_two_that_begin_at_once_one_gets_it(store: Store) -> None:
    both, refused = [Lease(store, "a"), Lease(store, "b")], list[Refusal]()

    def take(one: Lease) -> None:
        try:
            one.acquire()
        except Refusal as refusal:
            refused.append(refusal)

    threads = [threading.Thread(target=take, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(one.mine for one in both), len(refused)] == [1, 1]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": "a"}'])
def test_a_lease_that_was_cut_short_is_none(content: bytes, store: Store) -> None:
    store.write(NAME, content)
    Lease(store, "b").acquire()

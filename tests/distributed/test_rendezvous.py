"""Restarted workers agree on a fresh namespace, whatever dead and stale ones have left in the store."""

import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from evenkeel.common.errors import EndedHere
from evenkeel.distributed import refusals, rendezvous
from evenkeel.distributed.rendezvous import fresh_store, job_store
from tests.support.processes import free_port, wait_until
from tests.support.raised import refusal_of

ENOUGH = 120.0


@pytest.fixture(scope="module")
def store() -> Store:
    """One for all tests, so that each finds the keys of those before."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


Join = Callable[..., "Future[Store]"]


@pytest.fixture
def join(store: Store) -> Iterator[Join]:
    """Run one rank in a thread. Its time limit is its death: from then on it does nothing any more."""
    with ThreadPoolExecutor(64) as threads:

        def start(rank: int, world_size: int, lives: float = ENOUGH, delay: float = 0.0) -> Future[Store]:
            def work() -> Store:
                time.sleep(delay)
                return fresh_store(store, rank, world_size, timedelta(seconds=lives))

            return threads.submit(work)

        yield start


def agree(attempt: list[Future[Store]]) -> Store:
    """All ranks of an attempt are in one namespace, and it was empty."""
    views = [future.result() for future in attempt]
    assert [view.add("arrived", 1) for view in views] == list(range(1, len(views) + 1))
    return views[0]


def died(future: Future[Store]) -> bool:
    return isinstance(future.exception(), EndedHere)


def test_arrivals_in_any_order(join: Join) -> None:
    for seed in range(5):
        ranks = random.Random(seed).sample(range(8), 8)
        agree([join(rank, 8, delay=0.02 * i) for i, rank in enumerate(ranks)])


def test_stale_workers_of_another_size_are_left_alone(join: Join) -> None:
    stale = [join(rank, 3, lives=1.0) for rank in (0, 1)]
    agree([join(rank, 2) for rank in range(2)])
    assert all(map(died, stale))


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2, 2], [4, 2, 4, 3], [3, 1, 3]])
def test_one_attempt_after_another(join: Join, sizes: list[int]) -> None:
    for size in sizes:
        agree([join(rank, size) for rank in range(size)])


@pytest.mark.parametrize("dead_size", [3, 4])
def test_keys_of_an_attempt_that_died_half_way(join: Join, dead_size: int) -> None:
    dead = [join(rank, dead_size, lives=0.2) for rank in range(dead_size - 1)]
    assert all(map(died, dead))
    # The live rank 0 comes last, so that the others must all see through the dead one's call.
    agree([join(rank, 3, delay=0.3 if rank == 0 else 0) for rank in range(3)])


def test_a_worker_that_answers_and_dies_is_replaced(join: Join) -> None:
    first = join(0, 3)
    assert died(join(1, 3, lives=0.2))
    agree([first, join(1, 3), join(2, 3, delay=0.5)])


def test_workers_answered_by_a_dead_rank_0_go_to_the_live_one(join: Join) -> None:
    worker = join(1, 3)
    assert died(join(0, 3, lives=0.2))
    agree([join(0, 3), worker, join(2, 3)])


def test_a_dead_answer_is_found_out_though_all_others_are_there(join: Join) -> None:
    first = join(0, 3)
    assert died(join(1, 3, lives=0.2))
    time.sleep(rendezvous.ANSWER_TIMEOUT)
    last = join(2, 3)
    time.sleep(0.3)
    assert not first.done()
    assert not last.done()
    agree([first, join(1, 3), last])


def test_of_two_rank_0s_the_later_is_followed(join: Join, store: Store) -> None:
    namespace = PrefixStore("evenkeel/rendezvous/3", store)

    def call() -> bytes:
        return namespace.get("call") if namespace.check(["call"]) else b""

    def rank_0_that_has_called() -> Future[Store]:
        before, rank_0 = call(), join(0, 3)
        wait_until(lambda: call() != before, "a call")
        return rank_0

    stale = rank_0_that_has_called()
    worker = join(1, 3)
    later = rank_0_that_has_called()
    agree([later, worker, join(2, 3)])
    with pytest.raises(RuntimeError, match="another rank 0 has called"):
        stale.result()


@pytest.mark.parametrize("seed", range(3))
def test_never_two_of_a_rank_whoever_is_alive(join: Join, seed: int) -> None:
    choose = random.Random(seed)
    crowd = [
        (rank, join(rank, 3, lives=choose.uniform(0.1, 1), delay=choose.uniform(0, 0.5)))
        for rank in range(3)
        for _ in range(3)
    ]
    for rank, future in crowd:
        if future.exception() is None:
            assert future.result().add(f"of rank {rank}", 1) == 1


def test_the_time_limit_names_the_missing(join: Join) -> None:
    attempt = [join(rank, 6, lives=1.5) for rank in (0, 2, 5)]
    with pytest.raises(
        EndedHere, match=r"3 of 6 ranks are here; waiting for 1, 3, 4; gave up after 1\.5 s; see their logs"
    ):
        attempt[0].result()
    with pytest.raises(EndedHere, match=r"rank 2 of 6: .* 1\.5 s from rank 0\. "):
        attempt[1].result()


def test_the_time_limit_does_not_name_hundreds(join: Join) -> None:
    with pytest.raises(EndedHere, match=r"1 of 100 ranks are here; waiting for 1, 2, .*, 20, \.\.\.; gave up"):
        join(0, 100, lives=0.1).result()


def test_the_missing_are_named_while_they_are_awaited(join: Join, capfd: pytest.CaptureFixture[str]) -> None:
    attempt = [join(0, 3), join(2, 3)]
    said: list[str] = []

    def told() -> bool:
        said.append(capfd.readouterr().err)
        return "2 of 3 ranks are here; waiting for 1, for " in "".join(said)

    wait_until(told, "a line")
    agree([attempt[0], join(1, 3), attempt[1]])


@pytest.mark.parametrize("first", [0, 1])
def test_a_refusal_of_another_node_ends_the_waiting(join: Join, store: TCPStore, first: int) -> None:
    """Whoever was there before it; and without it they wait on."""
    namespace = PrefixStore("evenkeel/rendezvous/3", store)
    waiting = [join(rank, 3) for rank in range(first)]
    time.sleep(0.2)
    assert not any(future.done() for future in waiting)
    namespace.set("call", "refused by rank 2: no")
    waiting += [join(rank, 3) for rank in range(first, 2)]
    for future in waiting:
        assert "refused by rank 2: no" in refusal_of(future.result)
    namespace.delete_key("call")


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_where_nobody_listens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], host: str) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(
        EndedHere, match=rf"no answer at MASTER_ADDR={host} MASTER_PORT={port} for 5 s \(.+\); start rank 0"
    ):
        job_store(1, 2, timedelta(seconds=5))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1, "torch's own way prints nothing, or a warning for each try"
    assert re.fullmatch(
        rf"evenkeel: rank 1 of 2 waits for rank 0 at MASTER_ADDR={host} MASTER_PORT={port} \(.+\), for [345] s now",
        said[0],
    )


def test_a_refusal_outlives_the_call_that_comes_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    namespace = PrefixStore("evenkeel/rendezvous/2", store)
    place = {"RANK": 1, "WORLD_SIZE": 2, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2}
    of_the_agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in (place | of_the_agent).items():
        monkeypatch.setenv(name, str(value))
    with ThreadPoolExecutor(1) as threads:
        refusing = threads.submit(refusals.refuse_together, "no")
        wait_until(lambda: namespace.check(["call"]), "the refusal")
        namespace.set("call", "that of a rank 0 which saw no refusal just before")
        try:
            assert "refused by rank 1: no" in refusal_of(fresh_store, store, 0, 2, timedelta(seconds=2))
        finally:
            namespace.add("refused", 1)
        refusing.result()

"""Restarted workers agree on a fresh namespace, whatever dead and stale ones have left in the store."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from evenkeel import rendezvous
from evenkeel.errors import EndedHere, Refusal
from evenkeel.rendezvous import fresh_store, job_store

from .processes import LIMIT, free_port, wait_until

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


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2, 2], [4, 2, 4, 3], [3, 1, 3]])
def test_one_attempt_after_another(join: Join, sizes: list[int]) -> None:
    for size in sizes:
        agree([join(rank, size) for rank in range(size)])


def test_a_fresh_store_costs_little(join: Join) -> None:
    def seconds() -> float:
        start = time.monotonic()
        agree([join(rank, 8) for rank in range(8)])
        return time.monotonic() - start

    assert min(seconds() for _ in range(10)) < 1  # 0.02 to 0.05 on an idle machine


@pytest.mark.parametrize("dead_size", [3, 4])
def test_keys_of_an_attempt_that_died_half_way(join: Join, dead_size: int) -> None:
    dead = [join(rank, dead_size, lives=0.2) for rank in range(dead_size - 1)]
    assert all(map(died, dead))
    # The live rank 0 comes last, so that the others must all see through the dead one's call.
    agree([join(rank, 3, delay=0.3 if rank == 0 else 0) for rank in range(3)])


def test_workers_answered_by_a_dead_rank_0_go_to_the_live_one(join: Join) -> None:
    worker = join(1, 3)
    assert died(join(0, 3, lives=0.2))
    agree([join(0, 3), worker, join(2, 3)])


def test_stale_workers_of_another_size_are_left_alone(join: Join) -> None:
    stale = [join(rank, 3, lives=1.0) for rank in (0, 1)]
    agree([join(rank, 2) for rank in range(2)])
    assert all(map(died, stale))


def test_a_worker_that_answers_and_dies_is_replaced(join: Join) -> None:
    first = join(0, 3)
    assert died(join(1, 3, lives=0.2))
    agree([first, join(1, 3), join(2, 3, delay=0.5)])


def test_a_dead_answer_is_found_out_though_all_others_are_there(join: Join) -> None:
    first = join(0, 3)
    assert died(join(1, 3, lives=0.2))
    time.sleep(rendezvous.PATIENCE)
    last = join(2, 3)
    time.sleep(0.3)
    assert not first.done()
    assert not last.done()
    agree([first, join(1, 3), last])


def test_of_two_rank_0s_the_later_is_followed(join: Join, store: Store) -> None:
    room = PrefixStore("evenkeel/rendezvous/3", store)

    def call() -> bytes:
        return room.get("call") if room.check(["call"]) else b""

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


@pytest.mark.multiprocess
def test_of_two_live_workers_of_a_rank_one_is_let_in(join: Join) -> None:
    first, last, doubles = join(0, 3), join(2, 3), [join(1, 3, lives=3) for _ in range(2)]
    left_out, let_in = sorted(doubles, key=lambda double: double.exception() is None)
    assert died(left_out)
    agree([first, let_in, last])


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
        EndedHere, match=r"3 of 6 ranks are here; waiting for 1, 3, 4, in vain for 1\.5 s; see their logs"
    ):
        attempt[0].result()
    with pytest.raises(EndedHere, match=r"rank 2 of 6: .* 1\.5 s from rank 0\. "):
        attempt[1].result()


def test_the_time_limit_does_not_name_hundreds(join: Join) -> None:
    with pytest.raises(EndedHere, match=r"1 of 100 ranks are here; waiting for 1, 2, .*, 20, \.\.\., in vain"):
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
    room = PrefixStore("evenkeel/rendezvous/3", store)
    waiting = [join(rank, 3) for rank in range(first)]
    time.sleep(0.2)
    assert not any(future.done() for future in waiting)
    room.set("call", "refused by rank 2: no")
    waiting += [join(rank, 3) for rank in range(first, 2)]
    for future in waiting:
        with pytest.raises(Refusal, match="refused by rank 2: no"):
            future.result()
    room.delete_key("call")


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_where_nobody_listens_is_said_soon_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], host: str
) -> None:
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


# From here on with real torchruns. The worker connects, says so, and then does what files tell it to do.
# kill-RANK-COUNT: kill yourself. early-RANK-COUNT: do so before you connect. quiet: no collectives, so that
# nobody notices a death. stop: end well.
WORKER = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from evenkeel.errors import EndedHere, Refusal
from evenkeel.rendezvous import fresh_store, job_store

signal.alarm(500)  # nothing is left behind, come what may
mode, orders = sys.argv[1], Path(sys.argv[2])
variables = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
rank, world_size, count = (int(os.environ[name]) for name in variables)
timeout = timedelta(seconds=120)
if (orders / f"early-{rank}-{count}").exists():
    time.sleep(1)  # the others of its node are connecting by now
    os.kill(os.getpid(), signal.SIGKILL)
if rank == world_size - 1:
    time.sleep(0.5)  # workers never start in step; without this, the stock way sometimes has luck
if mode == "ours":
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store = fresh_store(store, rank, world_size, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
else:
    dist.init_process_group("gloo", timeout=timeout)
total = torch.tensor(1 << rank)
dist.all_reduce(total)
assert total == (1 << world_size) - 1
with (orders / "up").open("a") as up:
    up.write(json.dumps({"rank": rank, "world_size": world_size, "count": count}) + "\\n")
stop = torch.tensor(0)
while not stop:
    if (orders / f"kill-{rank}-{count}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if not (orders / "quiet").exists():
        stop += (orders / "stop").exists()
        dist.all_reduce(stop)
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Job:
    """Agents that run WORKER, and the folder through which it gets its orders."""

    def __init__(self, orders: Path) -> None:
        self.orders = orders
        self.agents: list[subprocess.Popen[bytes]] = []
        self.waited_for = 0
        (orders / "worker.py").write_text(WORKER)

    def start(self, *options: str, mode: str = "ours", **variables: str) -> subprocess.Popen[bytes]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
        with (self.orders / f"agent-{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen(
                [*torchrun, str(self.orders / "worker.py"), mode, str(self.orders)],
                env=_environment() | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)
        return agent

    def order(self, *names: str) -> None:
        for name in names:
            (self.orders / name).touch()

    def up(self) -> list[dict[str, int]]:
        """One entry for each worker that has ever been connected to all others."""
        path = self.orders / "up"
        whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for_ranks(self, counts: list[int]) -> None:
        """Wait for a new attempt, in which each rank r is up at restart count counts[r] of its agent."""
        wanted = [{"rank": r, "world_size": len(counts), "count": count} for r, count in enumerate(counts)]

        def all_up() -> bool:
            new = self.up()[self.waited_for :]
            return all(new.count(worker) == 1 for worker in wanted)

        self._wait(all_up, f"ranks with counts {counts}")
        self.waited_for = len(self.up())

    def wait(self, agent: subprocess.Popen[bytes]) -> int:
        self._wait(lambda: agent.poll() is not None, "the end of an agent")
        return agent.returncode

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_until(condition, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; up: {self.up()}\n{self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.orders.glob("*.log"))


def _environment() -> dict[str, str]:
    # A plain torchrun of a user has no variables set. The DNS is asked for every peer's name, and must not
    # slow down the tests.
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "MASTER_"))}
    return plain | {"RES_OPTIONS": "timeout:1 attempts:1"}


def _kill_tree(process: subprocess.Popen[Any]) -> None:
    """SIGKILL a process and its descendants. Workers are in sessions of their own, so no group has them all."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    tree = [process.pid]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    if process.poll() is None:
        for pid in tree:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for agent in job.agents:
        _kill_tree(agent)


@pytest.mark.multiprocess
def test_a_plain_torchrun_survives_two_restarts(job: Job) -> None:
    job.order("kill-2-0", "kill-2-1", "stop")
    agent = job.start("--standalone", "--nproc_per_node=3", "--max-restarts=3")
    assert job.wait(agent) == 0, job.logs()
    job.wait_for_ranks([2, 2, 2])


@pytest.mark.multiprocess
def test_the_stock_way_does_not(job: Job) -> None:
    job.order("kill-2-0", "stop")
    agent = job.start("--standalone", "--nproc_per_node=3", "--max-restarts=1", mode="stock")
    job.wait_for_ranks([0, 0, 0])
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may fail at once, at its time limit or never
        agent.wait(timeout=25)
    assert agent.poll() != 0
    assert len([worker for worker in job.up() if worker["count"] == 1]) < 3


def _node(number: int, port: int, ranks: int, last_call: int) -> list[str]:
    conf = f"is_host={number == 0},last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=6"
    return [
        *("--nnodes=1:2", f"--nproc_per_node={ranks}", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"),
        f"--local-addr=127.0.0.{1 + number}",  # nodes are ranked by address
    ]


@pytest.mark.multiprocess
def test_restart_counts_differ_and_then_a_node_is_lost(job: Job) -> None:
    job.order("quiet")
    port = free_port()
    other = job.start(*_node(1, port, ranks=1, last_call=6))
    first = job.start(*_node(0, port, ranks=2, last_call=6))
    job.wait_for_ranks([0, 0, 0])
    job.order("kill-2-0")  # quietly: node 1 restarts, node 0 only hears that node 1 wants in again
    job.wait_for_ranks([0, 0, 1])
    _kill_tree(other)
    (job.orders / "quiet").unlink()
    job.wait_for_ranks([1, 1])
    job.order("stop")
    assert job.wait(first) == 0, job.logs()


@pytest.mark.multiprocess
def test_a_node_restarts_alone_while_the_other_waits_for_it(job: Job) -> None:
    static = ["--nnodes=2", "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    job.order("early-2-0", "stop")
    agents = [job.start(*static, f"--node-rank={node}", f"--nproc_per_node={1 + node}") for node in range(2)]
    assert [job.wait(agent) for agent in agents] == [0, 0], job.logs()
    job.wait_for_ranks([0, 1, 1])


@pytest.mark.multiprocess
def test_a_node_joins(job: Job) -> None:
    port = free_port()
    # torchrun cannot scale up while it shares its store with the workers. With this, their store is fresh.
    unshared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first = job.start(*_node(0, port, ranks=1, last_call=1), **unshared)
    job.wait_for_ranks([0])
    other = job.start(*_node(1, port, ranks=1, last_call=1), **unshared)
    job.wait_for_ranks([0, 0])
    job.order("stop")
    assert (job.wait(first), job.wait(other)) == (0, 0), job.logs()


ORPHAN = """
import os, sys, time
from datetime import timedelta
from torch.distributed import HashStore
from evenkeel.errors import EndedHere, Refusal
from evenkeel.rendezvous import fresh_store, job_store

if os.fork():
    time.sleep(0.2)
    os._exit(0)  # the agent dies
try:
    fresh_store(HashStore(), 1, 2, timedelta(seconds=20))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.multiprocess
def test_a_worker_does_not_outlive_its_agent() -> None:
    command = [sys.executable, "-c", ORPHAN]
    environment = _environment() | {"TORCHELASTIC_RUN_ID": "some"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert "agent of this worker has died" in done.stdout


def test_a_refusal_outlives_the_call_that_comes_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    room = PrefixStore("evenkeel/rendezvous/2", store)
    place = {"RANK": 1, "WORLD_SIZE": 2, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2}
    of_the_agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in (place | of_the_agent).items():
        monkeypatch.setenv(name, str(value))
    with ThreadPoolExecutor(1) as threads:
        refusing = threads.submit(rendezvous.refuse_together, "no")
        wait_until(lambda: room.check(["call"]), "the refusal")
        room.set("call", "that of a rank 0 which saw no refusal just before")
        try:
            with pytest.raises(Refusal, match="refused by rank 1: no"):
                fresh_store(store, 0, 2, timedelta(seconds=2))
        finally:
            room.add("refused", 1)
        refusing.result()

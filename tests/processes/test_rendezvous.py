"""Restarted workers agree on a fresh namespace, whatever dead and stale ones have left in the store."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_rendezvous import (
    Join,
    agree,
    died,
    join,  # noqa: F401  (a fixture)
    store,  # noqa: F401  (a fixture)
)
from tests.support.processes import LIMIT, free_port, wait_until
from tests.support.small_runs import children


def test_of_two_live_workers_of_a_rank_one_is_let_in(join: Join) -> None:
    first, last, doubles = join(0, 3), join(2, 3), [join(1, 3, lives=3) for _ in range(2)]
    left_out, let_in = sorted(doubles, key=lambda double: double.exception() is None)
    assert died(left_out)
    agree([first, let_in, last])


# From here on with real torchruns. The worker connects, says so, and then does what files tell it to do.
# kill-RANK-COUNT: kill yourself. early-RANK-COUNT: do so before you connect. quiet: no collectives, so that
# nobody notices a death. stop: end well.
WORKER = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from evenkeel.common.errors import EndedHere, Refusal
from evenkeel.distributed.rendezvous import fresh_store, job_store

signal.alarm(500)  # nothing is left behind, come what may
mode, orders = sys.argv[1], Path(sys.argv[2])
variables = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
rank, world_size, count = (int(os.environ[name]) for name in variables)
timeout = timedelta(seconds=120)
if (orders / f"early-{rank}-{count}").exists():
    time.sleep(1)  # the others of its node are connecting by now
    os.kill(os.getpid(), signal.SIGKILL)
if rank == world_size - 1:
    # workers never start in step; without this, the stock way sometimes has luck
    time.sleep(0.5 if mode == "ours" else 2)
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
    tree = [process.pid]
    for pid in tree:
        with contextlib.suppress(OSError):  # it has just ended
            tree += children(pid)
    for pid in tree if process.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for agent in job.agents:
        _kill_tree(agent)


def _node(number: int, port: int, ranks: int, last_call: int) -> list[str]:
    conf = f"is_host={number == 0},last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=6"
    return [
        *("--nnodes=1:2", f"--nproc_per_node={ranks}", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"),
        f"--local-addr=127.0.0.{1 + number}",  # nodes are ranked by address
    ]


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


def test_a_node_restarts_alone_while_the_other_waits_for_it(job: Job) -> None:
    static = ["--nnodes=2", "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    job.order("early-2-0", "stop")
    agents = [job.start(*static, f"--node-rank={node}", f"--nproc_per_node={1 + node}") for node in range(2)]
    assert [job.wait(agent) for agent in agents] == [0, 0], job.logs()
    job.wait_for_ranks([0, 1, 1])


ORPHAN = """
import os, sys, time
from datetime import timedelta
from torch.distributed import HashStore
from evenkeel.common.errors import EndedHere, Refusal
from evenkeel.distributed.rendezvous import fresh_store, job_store

if os.fork():
    time.sleep(0.2)
    os._exit(0)  # the agent dies
try:
    fresh_store(HashStore(), 1, 2, timedelta(seconds=20))
except RuntimeError as error:
    print(error)
"""


def test_a_worker_does_not_outlive_its_agent() -> None:
    command = [sys.executable, "-c", ORPHAN]
    environment = _environment() | {"TORCHELASTIC_RUN_ID": "some"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert "agent of this worker has died" in done.stdout

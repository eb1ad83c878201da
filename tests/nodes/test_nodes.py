"""The launchers on real nodes: network namespaces with their own addresses, names and processes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.nodes import Lab
from tests.support.processes import LIMIT, wait_until

SOON = 30.0
"""Seconds. It takes 7 to 8, with torch's own timings about 44."""


# Adds up ones over all ranks, again and again, until the file "stop" is there. Rank 0 keeps a diary.
WORKER = """
import json, os, socket, sys, time
from datetime import timedelta
from pathlib import Path

folder = Path(sys.argv[1])

def note(event):
    if os.environ["RANK"] == "0":
        with (folder / "diary").open("a") as out:
            out.write(f"{time.time()} {event} {os.environ['WORLD_SIZE']}\\n")

note("start")
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, world = dist.get_rank(), dist.get_world_size()
names = ["MASTER_ADDR", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"]
facts = {"host": socket.gethostname(), "world": world, **{name: os.environ.get(name) for name in names}}
(folder / f"rank{rank}.json").write_text(json.dumps(facts))
while True:
    numbers = torch.tensor([1.0, float(rank == 0 and (folder / "stop").exists())])
    dist.all_reduce(numbers)
    assert numbers[0] == world
    note("step")
    if numbers[1]:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Wait(NamedTuple):
    """Seconds; all but the first depend on how fast torch is imported here, in all ranks at the same time."""

    started: float  # until the ranks were started
    stepped: float  # until they had done a step
    idle: float  # from the last step before it

    def __str__(self) -> str:
        return f"ranks start after {self.started:.1f} s, step after {self.stepped:.1f}, idle for {self.idle:.1f}"


class Job:
    """A job over the nodes of a lab, started node by node with the launcher."""

    def __init__(self, lab: Lab, folder: Path, nodes: str, *options: str) -> None:
        self.lab, self.folder, self.nodes, self.options = lab, folder, nodes, options
        self.launchers: dict[int, subprocess.Popen[Any]] = {}
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)

    def start(self, node: int) -> None:
        words = [*self.options, "--script", self.script, "--", self.folder]
        self.launchers[node] = self.lab.launch(node, self.nodes, self.folder / f"node{node}.log", *words)

    def wait_for(self, world: int) -> Wait:
        """Wait for a step on so many ranks from now on."""
        begin = time.time()

        def there() -> Wait | None:
            diary = [line.split() for line in self.diary()]
            events = [(float(at) - begin, event) for at, event, size in diary if int(size) == world]
            started = [at for at, event in events if event == "start" and at > 0]
            stepped = [at for at, event in events if event == "step" and at > 0]
            if stepped:
                before = [float(at) - begin for at, event, _ in diary if event == "step"]
                idle = stepped[0] - max([at for at in before if at < stepped[0]], default=stepped[0])
                return Wait((started or [0.0])[0], stepped[0], idle)
            return None

        found: Wait = wait_until(there, f"a step on {world} ranks", more=self.logs, every=0.05)
        return found

    def finish(self) -> dict[int, int]:
        """Ask the ranks to end, and return the exit status of every launcher."""
        (self.folder / "stop").touch()
        return {node: launcher.wait(timeout=LIMIT) for node, launcher in self.launchers.items()}

    def diary(self) -> list[str]:
        path = self.folder / "diary"
        return path.read_text().splitlines() if path.exists() else []

    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("node*.log")))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    labs = []

    def start_job(nodes: int, *options: str) -> Job:
        labs.append(Lab(nodes).__enter__())
        job = Job(labs[-1], tmp_path, *options)
        for node in labs[-1].nodes:
            job.start(node)
        return job

    yield start_job
    for lab in labs:
        lab.close()


def test_two_nodes_of_two_ranks_and_one_that_comes_back(start: Callable[..., Job]) -> None:
    job = start(2, "2", "-g", "2")
    job.wait_for(4)
    facts = job.facts()
    assert [f["host"] for f in facts] == [job.lab.hostname(n) for n in (0, 0, 1, 1)]
    assert {f["MASTER_ADDR"] for f in facts} == {job.lab.address(0)}
    assert {f["GLOO_SOCKET_IFNAME"] for f in facts} == {"eth0"}
    assert {f["TORCHELASTIC_RUN_ID"] for f in facts} == {"evenkeel-29500"}

    job.lab.kill_node(1)
    job.lab.start_node(1)
    job.start(1)  # the same address as the dead agent, and most likely the same pid
    print(f"\nreturn to a job of fixed size: {job.wait_for(4)}")
    assert job.finish() == {0: 0, 1: 0}, job.logs()
    assert job.lab.commands(0) == job.lab.commands(1) == []


def test_three_nodes_lose_one_go_on_and_take_it_back(start: Callable[..., Job]) -> None:
    job = start(3, "1:3")
    job.wait_for(3)

    job.lab.kill_node(1)
    loss = job.wait_for(2)
    print(f"\nloss of a node: {loss}")
    assert loss.started < SOON, job.logs()

    job.lab.start_node(1)
    job.start(1)
    print(f"its return: {job.wait_for(3)}")

    job.lab.signal(job.launchers[2], signal.SIGTERM)
    leave = job.wait_for(2)
    print(f"SIGTERM to a node: {leave}")
    assert leave.started < SOON, job.logs()
    assert job.launchers.pop(2).wait(timeout=LIMIT) == 75, "stopped because it was asked to"
    assert job.lab.commands(2) == []

    assert job.finish() == {0: 0, 1: 0}, job.logs()

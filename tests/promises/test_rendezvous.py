"""A killed rank comes back under a plain torchrun."""

import contextlib
import subprocess

import pytest

from tests.processes.test_rendezvous import Job, job  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


def test_a_plain_torchrun_survives_two_restarts(job: Job) -> None:
    job.order("kill-1-0", "kill-1-1", "stop")
    agent = job.start("--standalone", "--nproc_per_node=2", "--max-restarts=3")
    assert job.wait(agent) == 0, job.logs()
    job.wait_for_ranks([2, 2])


def test_the_stock_way_does_not(job: Job) -> None:
    job.order("kill-2-0", "stop")
    agent = job.start("--standalone", "--nproc_per_node=3", "--max-restarts=1", mode="stock")
    job.wait_for_ranks([0, 0, 0])
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may fail at once, at its time limit or never
        agent.wait(timeout=20)
    assert agent.poll() != 0
    assert len([worker for worker in job.up() if worker["count"] == 1]) < 3

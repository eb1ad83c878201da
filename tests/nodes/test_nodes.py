"""The launchers on real nodes: network namespaces with their own addresses, names and processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.nodes.test_train import ended, type_in, wait_for_three_steps
from tests.support.nodes import Lab
from tests.support.processes import LIMIT, read, records
from tests.support.small_runs import job, starts, wait_for_start

SOON = 30.0
"""Seconds. It takes 7 to 8, with torch's own timings about 44."""


def held_job(folder: Path) -> list[str]:
    """A run that is slow while there is a file `hold` beside it: it would take ten minutes."""
    (folder / "hold").touch()
    rare = ["--checkpoint-every", 0, "--eval-every", 1000]
    return job(folder / "run", "--epochs", 30, "--pause", 1, "--hold", folder / "hold", *rare)


def wait_for_ranks(run_dir: Path, world_size: int, attempts: int) -> None:
    """Until so many ranks have done three steps in a later attempt than so many."""
    wait_for_start(run_dir, attempts + 1)
    wait_for_three_steps(run_dir, world_size)


def test_two_nodes_of_two_ranks_and_one_that_comes_back(tmp_path: Path) -> None:
    run_dir, options = tmp_path / "run", held_job(tmp_path)
    with Lab(2) as lab:
        jobs = type_in(lab, "2", options, tmp_path, "-g", "2")
        wait_for_three_steps(run_dir, 4)
        lab.kill_node(1)
        lab.start_node(1)
        # the same address as the dead agent, and most likely the same pid
        jobs[1] = lab.launch(1, "2", tmp_path / "node1.log", "-g", "2", "--", *options)
        wait_for_ranks(run_dir, 4, attempts=1)
        (tmp_path / "hold").unlink()
        ended(jobs, tmp_path)
        assert lab.commands(0) == lab.commands(1) == []
    assert set(read(run_dir)["world_sizes"]) == {4}


def test_three_nodes_lose_one_go_on_and_take_it_back(tmp_path: Path) -> None:
    run_dir, options = tmp_path / "run", held_job(tmp_path)
    with Lab(3) as lab:
        jobs = type_in(lab, "1:3", options, tmp_path)
        wait_for_three_steps(run_dir, 3)
        for what in ("kill -9", "SIGTERM"):
            before, begun = len(starts(run_dir)), time.time()
            if what == "kill -9":
                lab.kill_node(1)
            else:
                lab.signal(jobs[2], signal.SIGTERM)
            wait_for_ranks(run_dir, 2, before)
            took = records(run_dir, "start")[before]["time"] - begun
            print(f"ranks start {took:.1f} s after {what} of a node")
            assert took < SOON, (tmp_path / "node0.log").read_text()
            if what == "kill -9":
                before = len(starts(run_dir))
                lab.start_node(1)
                jobs[1] = lab.launch(1, "1:3", tmp_path / "node1.log", "--", *options)
                wait_for_ranks(run_dir, 3, before)
        assert jobs.pop(2).wait(timeout=LIMIT) == 75, "stopped because it was asked to"
        assert lab.commands(2) == []
        (tmp_path / "hold").unlink()
        ended(jobs, tmp_path)

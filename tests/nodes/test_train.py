"""train.py on several real nodes: the README's two lines, and an elastic job that loses a node."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes import Lab
from tests.support.processes import LIMIT, read, records, wait_until
from tests.support.readme import blocks
from tests.support.small_runs import PLAN, SAMPLES, job, starts, steps_of, wait_for_start


def type_in(lab: Lab, nodes: str, options: list[str], folder: Path, *more: str) -> list[subprocess.Popen[Any]]:
    """Start the launcher on all nodes of the lab: `nodes` is N or MIN:MAX, `more` are other options of it."""
    return [lab.launch(node, nodes, folder / f"node{node}.log", *more, "--", *options) for node in lab.nodes]


def ended(jobs: list[subprocess.Popen[Any]], folder: Path) -> None:
    """Wait for the good ends of the launchers of the first nodes."""
    for node, process in enumerate(jobs):
        assert process.wait(timeout=LIMIT) == 0, (folder / f"node{node}.log").read_text()


def wait_for_three_steps(run_dir: Path, world_size: int) -> None:
    """Until so many ranks have done three steps. A slow node joins later, and the ranks start again with it."""

    def done() -> bool:
        if not (run_dir / "metrics.jsonl").exists():
            return False
        starts, steps = records(run_dir, "start"), records(run_dir, "train")
        together = bool(starts) and starts[-1]["world_size"] == world_size
        return together and len([step for step in steps if step["time"] > starts[-1]["time"]]) >= 3

    log = run_dir.parent / "node0.log"
    wait_until(done, f"three steps on {world_size} nodes", more=log.read_text)


def assert_no_step_was_lost(run_dir: Path) -> None:
    """Each attempt starts where the one before has ended."""
    ends = sorted(records(run_dir, "failure") + records(run_dir, "stop"), key=lambda record: record["time"])
    assert [record["step"] for record in records(run_dir, "start")] == [0, *(record["step"] for record in ends)]


def test_the_two_lines_of_the_readme_train_the_digits(tmp_path: Path) -> None:
    (block,) = blocks("bash nodes")
    lines = block.splitlines()
    assert len(lines) == 2
    with Lab(2) as lab:
        typed = block.replace("node0", lab.address(0)).replace("runs/two-nodes", str(tmp_path / "run")).splitlines()
        words = [[sys.executable, *shlex.split(line)] for line in typed]
        ended([lab.start(node, words[node], tmp_path / f"node{node}.log") for node in lab.nodes], tmp_path)
    assert read(tmp_path / "run")["world_sizes"] == [4]
    assert read(tmp_path / "run")["samples_seen"] == 2 * 1437


RARE = ["--checkpoint-every", 0, "--eval-every", 1000]

SOON = 30.0
"""Seconds. It takes 7 to 8, with torch's own timings about 44."""


def held_job(folder: Path) -> list[str]:
    """A run that is slow while there is a file `hold` beside it: it would take ten minutes."""
    (folder / "hold").touch()
    return job(folder / "run", "--epochs", 30, "--pause", 1, "--hold", folder / "hold", *RARE)


def wait_for_ranks(run_dir: Path, world_size: int, attempts: int) -> None:
    """Until so many ranks have done three steps in a later attempt than so many."""
    wait_for_start(run_dir, attempts + 1)
    wait_for_three_steps(run_dir, world_size)


@pytest.mark.long
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


def test_three_nodes_lose_one_go_on_and_take_it_back_and_no_step_is_lost(tmp_path: Path) -> None:
    """By kill -9 and by SIGTERM, in mid-epoch and without a checkpoint. The others go on at the exact next step."""
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
    assert_no_step_was_lost(run_dir)
    assert steps_of(run_dir) == list(range(1, 30 * PLAN.total_steps // PLAN.epochs + 1)), "none is done twice"
    assert read(run_dir)["samples_seen"] == 30 * SAMPLES


def test_a_cable_is_cut_and_the_job_goes_on_without_that_node(tmp_path: Path, run_dir: Path) -> None:
    """No connection is reset, so that nothing fails: only the watch for hangs notices."""
    with Lab(2) as lab:
        jobs = type_in(lab, "1:2", job(run_dir, "--pause", 0.1, *RARE, "--hang-timeout", 6), tmp_path)
        wait_for_three_steps(run_dir, 2)
        lab.unplug(1)
        ended(jobs[:1], tmp_path)
    told = (tmp_path / "node0.log").read_text()
    assert "no progress for 6 s: rank 1 does not answer any more, last seen in" in told
    starts, failure = records(run_dir, "start"), records(run_dir, "failure")[-1]
    assert starts[-1]["world_size"] == 1
    assert_no_step_was_lost(run_dir)
    print(f"continued {starts[-1]['time'] - failure['time']:.1f} s after the snapshot, at step {failure['step']}")
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES


def test_the_node_of_rank_0_dies_and_the_state_is_found_on_the_survivor(tmp_path: Path, run_dir: Path) -> None:
    """Nothing is shared: each node has a disk of its own under the run directory; node 0 comes back with an empty one.

    Not a single checkpoint was planned, and the rendezvous dies with node 0, so the job is typed again.
    """
    run_dir.mkdir()
    options = job(run_dir, "--pause", 0.15, "--eval-every", 1000, "--checkpoint-every")
    with Lab(2) as lab:

        def on_disk(node: int, name: str) -> str:
            return lab.run(node, ["bash", "-c", f"cat {run_dir}/{name} 2>/dev/null || true"])

        for node in lab.nodes:
            lab.run(node, ["mount", "-t", "tmpfs", "disk", str(run_dir)])
        jobs = type_in(lab, "2", [*options, "0"], tmp_path)
        wait_until(lambda: on_disk(0, "metrics.jsonl").count('"train"') >= 3, "three steps")
        lab.kill_node(0)
        assert jobs[1].wait(timeout=LIMIT) != 0
        (snapshot,) = lab.run(1, ["ls", f"{run_dir}/checkpoints"]).split()
        assert snapshot.startswith("step-")

        lab.start_node(0)
        lab.run(0, ["mount", "-t", "tmpfs", "disk", str(run_dir)])
        ended(type_in(lab, "2", [*options, "5"], tmp_path), tmp_path)
        begun = json.loads(next(line for line in on_disk(0, "metrics.jsonl").splitlines() if '"start"' in line))
        assert begun["step"] >= 3
        assert begun["attempt"] == 2, "the survivor also knew the run's history"
        assert json.loads(on_disk(0, "summary.json"))["samples_seen"] == PLAN.epochs * SAMPLES
        assert snapshot not in lab.run(1, ["ls", f"{run_dir}/checkpoints"]), "a leftover, after the next checkpoint"

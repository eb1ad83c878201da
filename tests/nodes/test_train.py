"""train.py on several real nodes: the README's two lines, and an elastic job that loses a node."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.nodes import Lab
from tests.support.processes import LIMIT, read, records, wait_until
from tests.support.readme import blocks
from tests.support.small_runs import PLAN, SAMPLES, job, steps_of, wait_for_start


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
ALL_STEPS = list(range(1, PLAN.total_steps + 1))


def test_a_node_is_lost_in_mid_epoch_and_no_step_with_it(tmp_path: Path, run_dir: Path) -> None:
    """Three nodes; one that does not hold rank 0 dies by kill -9. The others go on at the exact next step."""
    with Lab(3) as lab:
        jobs = type_in(lab, "1:3", job(run_dir, "--pause", 0.1, *RARE), tmp_path)
        wait_for_three_steps(run_dir, 3)
        lab.kill_node(2)
        ended(jobs[:2], tmp_path)
    starts, failure = records(run_dir, "start"), records(run_dir, "failure")[-1]
    assert starts[-1]["world_size"] == 2
    assert_no_step_was_lost(run_dir)  # though there was no checkpoint
    print(f"continued {starts[-1]['time'] - failure['time']:.1f} s after the loss, at step {failure['step']}")
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    assert steps_of(run_dir) == ALL_STEPS, "no step is done twice"


def test_a_node_joins_in_mid_epoch_and_no_step_is_lost(tmp_path: Path) -> None:
    run_dir, hold = tmp_path / "run", tmp_path / "hold"
    hold.touch()  # slowly: on a busy machine the second node takes half a minute to start
    words = ["--", *job(run_dir, "--pause", 1, "--hold", hold, *RARE)]
    with Lab(2) as lab:
        jobs = [lab.launch(0, "1:2", tmp_path / "node0.log", *words)]
        wait_for_three_steps(run_dir, 1)
        jobs.append(lab.launch(1, "1:2", tmp_path / "node1.log", *words))
        wait_for_start(run_dir, 2)
        hold.unlink()
        ended(jobs, tmp_path)
    assert read(run_dir)["world_sizes"] == [1, 2]
    (stop,), (_, again) = records(run_dir, "stop"), records(run_dir, "start")
    assert again["step"] == stop["step"]
    print(f"continued {again['time'] - stop['time']:.1f} s after the second node had joined, at step {stop['step']}")
    assert steps_of(run_dir) == ALL_STEPS, "no step is lost or done twice"
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES


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

"""Chaos on several nodes: ranks, agents and whole nodes die, and the run ends as if nothing had happened."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.chaos import chaos, faults_in, reported, still_running
from tests.support.processes import ROOT, TRAIN, checked, finish, read, records, run, start, torchrun, wait_until
from tests.support.small_runs import PLAN, SAMPLES, job


def namespaces(maker: int) -> list[Path]:
    """The network namespaces of the labs of a process; other tests may have labs at the same time."""
    return list(Path("/var/run/netns").glob(f"ek{maker}-*"))


def elastic(*options: object) -> list[str]:
    """One to three nodes of one rank each, as the command of chaos."""
    head = [sys.executable, str(ROOT / "launch" / "multi_node.py"), "-n", "1:3", "-g", "1"]
    head += ["--max-restarts", "10"]  # or node 0 may use up its three, and all nodes are started again
    return [*head, "-nr", "{node}", "--master", "{master}", "--", *map(str, options)]


@pytest.mark.long
def test_nodes_and_ranks_are_lost_and_no_sample_with_them(run_dir: Path) -> None:
    options = job(run_dir, "--pause", 0.4, "--checkpoint-every", 0, "--eval-every", 1000)
    # a rank, and then a node, for 18 s: so long that the others go on without it, and not so long that they finish
    mix = "--nodes 3 --kill-every 2s --seed 137 --count 2 --faults kill,node"
    process = start(chaos(mix, *elastic(*options)))
    wait_until(lambda: len(namespaces(process.pid)) == 4, "the lab: a switch and three nodes")
    done = checked(finish(process, limit=550), 0)
    print(f"\n{done.stdout[done.stdout.rindex('  run ') :]}")

    kinds = [kind for kind, _ in faults_in(done.stdout)]
    assert set(kinds) == {"kill", "node"}
    lost = [re.match(r"node (\d), back in \d+ s", whom) for kind, whom in faults_in(done.stdout) if kind == "node"]
    assert all(node and node[1] != "0" for node in lost), "node 0 hosts the rendezvous"
    assert {record["world_size"] for record in records(run_dir, "start")} > {3}, "the others went on without it"
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    steps = {record["step"] for record in records(run_dir, "train")}
    assert max(steps) == PLAN.total_steps
    assert reported(done.stdout, "run") == "finished"
    assert reported(done.stdout, "in place").startswith("1 of "), "after the kill, and not after the loss of a node"
    assert still_running(run_dir) == []
    assert namespaces(process.pid) == []


@pytest.mark.long
def test_a_node_that_is_back_after_the_end_is_not_waited_for(run_dir: Path) -> None:
    """Chaos took four faults of six seconds and waited for node 1, which waited for node 0, for ever."""
    alone = shlex.join([*torchrun(1, TRAIN), *job(run_dir)])
    command = ["bash", "-c", f"(({{node}} == 0)) || exec sleep 1000; exec {alone}"]
    done = run(chaos(f"--nodes 2 --faults kill --minutes 0.01 --run-dir {run_dir}", *command), limit=120)
    assert reported(done.stdout, "run") == "finished"
    assert reported(done.stdout, "starts") == "2 of the command, 1 of its ranks"

"""A job's life on a real cluster: it lives with everything that Slurm does to jobs; and the lab on which it stands."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from evenkeel.common.naming import BIT_FLIPS
from tests.cluster.cluster import Cluster
from tests.cluster.jobs import (
    ended,
    kill,
    logs,
    ranks,
    recorded,
    sbatch,
    steps_lost,
    submitted,
    undisturbed,
    wait_for_step,
)
from tests.support.processes import read, records, wait_until

Weights = Callable[[int], str]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The weights after so many epochs of one process that nobody has disturbed."""

    @cache
    def weights(epochs: int) -> str:
        folder = tmp_path_factory.mktemp("alone")
        return str(undisturbed(folder / "run", epochs)["weights_sha256"])

    return weights


def test_at_its_time_limit_a_job_is_saved_and_goes_on(cluster: Cluster, tmp_path: Path, alone: Weights) -> None:
    run_dir, hold = tmp_path / "run", tmp_path / "hold"
    hold.touch()
    options = recorded(run_dir, "--wandb", "disabled", "--checkpoint-every", 0, "--pause", 1, "--hold", hold, epochs=4)
    job = sbatch(cluster, ["-N1-2", "--gpus-per-node=1", "-t10"], options, tmp_path)
    wait_for_step(cluster, job, run_dir, 1)
    assert records(run_dir, "start")[0]["world_size"] == 2
    cluster.drain(1, 3, 4)
    # not by -t2: on a slow machine the warning, 90 s before the end, would come before the first step
    cluster.slurm("scontrol", "update", f"jobid={job}", "EndTime=now+95")
    cluster.wait_for(job, "RUNNING", restarts=1)
    hold.unlink()
    cluster.slurm("scontrol", "update", f"jobid={job}", "TimeLimit=10")
    shown = ended(cluster, job, run_dir)
    assert int(shown["Restarts"]) >= 1
    summary = read(run_dir)
    assert {stop["reason"] for stop in records(run_dir, "stop")} <= {"SIGUSR2", "SIGTERM"}
    assert steps_lost(run_dir) == [0]
    assert summary["world_sizes"] == [2, 1]
    assert summary["weights_sha256"] == alone(4)


def test_one_job_through_all_that_can_happen_to_it(cluster: Cluster, tmp_path: Path, alone: Weights) -> None:
    run_dir = tmp_path / "run"
    options = ["--wandb", "offline", "--checkpoint-every", 5, "--pause", 0.25]
    job = submitted(cluster, "-n", "1:2", "-g", 1, "--max-restarts", 5, "--", *recorded(run_dir, *options, epochs=6))

    def progress(attempts: int) -> None:
        """Two more steps, in the next attempt."""
        wait_for_step(cluster, job, run_dir, records(run_dir, "start")[-1]["step"] + 2 if attempts > 1 else 2, attempts)

    progress(1)
    wandb_id = read(run_dir, "status.json")["wandb_id"]

    cluster.slurm("scontrol", "requeue", job)
    progress(2)
    assert steps_lost(run_dir)[-1] == 0

    preempt(cluster, tmp_path)
    progress(3)
    assert steps_lost(run_dir)[-1] == 0

    requeues = cluster.show(job)["Restarts"]
    kill(ranks(cluster)[-1:])
    progress(4)
    assert cluster.show(job)["Restarts"] == requeues, "a rank is started again within the job"
    assert read(run_dir, "status.json")["restarts_in_place"] == 1, "without torchrun"
    assert steps_lost(run_dir)[-1] == 0

    kill([process for process in cluster.processes_left() if process.command.startswith("python")])
    progress(5)
    assert 0 <= steps_lost(run_dir)[-1] <= 6, "without warning, back to the last checkpoint"

    cluster.kill_node(ranks(cluster)[-1].node)
    ended(cluster, job, run_dir)
    assert 0 <= steps_lost(run_dir)[-1] <= 6
    assert read(run_dir)["weights_sha256"] == alone(6)
    assert read(run_dir, "status.json")["wandb_id"] == wandb_id
    assert {path.name.rpartition("-")[2] for path in run_dir.glob("wandb/offline-run-*")} == {wandb_id}


def preempt(cluster: Cluster, folder: Path) -> None:
    urgent = folder / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 2\n")
    cluster.wait_for(cluster.submit(urgent, "-phigh", "-N4", "-c2"), "COMPLETED")


@pytest.mark.long
def test_preempted_without_grace_it_goes_on(cluster: Cluster, tmp_path: Path, run_dir: Path, alone: Weights) -> None:
    options = ["--wandb", "disabled", "--checkpoint-every", 4, "--pause", 0.3]
    job = submitted(cluster, "-n", 2, "-g", 1, "--partition", "lowhard", "--", *recorded(run_dir, *options, epochs=4))
    wait_for_step(cluster, job, run_dir, 6)
    preempt(cluster, tmp_path)
    ended(cluster, job, run_dir)
    (lost,) = steps_lost(run_dir)
    assert 0 <= lost <= 5
    assert read(run_dir)["weights_sha256"] == alone(4)


def left_out(cluster: Cluster, job: str) -> list[str]:
    """Nodes that a job does not want."""
    return cluster.slurm("scontrol", "show", "hostnames", cluster.show(job)["ExcNodeList"]).split()


def wait_until_left_out(cluster: Cluster, job: str, run_dir: Path, node: str) -> None:
    """Until a requeued job that does not want node4 leaves out this one too, and no other."""
    wait_until(lambda: len(left_out(cluster, job)) > 1, "a node is left out", 30, lambda: logs(run_dir))
    assert sorted(left_out(cluster, job)) == [node, "node4"]


@pytest.mark.long
def test_a_node_that_computes_wrong_twice_is_left_out(
    cluster: Cluster, tmp_path: Path, alone: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank is wrong on every use, so the run ends. The control is the test below: no requeue after a bug."""
    run_dir, fault = tmp_path / "run", tmp_path / "fault.json"
    fault.write_text(json.dumps({"rank": 1, "where": "gradient", "sticky": True, "seed": 5, "step": 4}))
    monkeypatch.setenv(BIT_FLIPS, str(fault))
    options = recorded(run_dir, "--wandb", "disabled", "--verify-every", 1, epochs=4)
    job = submitted(cluster, "-n", "2:3", "-g", 1, "--exclude", "node4", "--max-restarts", 0, "--", *options)
    cluster.wait_for(job, "PENDING", restarts=1)
    (wrong,) = read(run_dir, "status.json")["wrong_nodes"]
    assert wrong in ("node1", "node2", "node3")

    wait_until_left_out(cluster, job, run_dir, wrong)
    shown = ended(cluster, job, run_dir)
    assert wrong not in cluster.slurm("scontrol", "show", "hostnames", shown["NodeList"]).split()
    assert read(run_dir)["world_sizes"] == [3, 2]
    assert steps_lost(run_dir) == [0]
    assert read(run_dir)["weights_sha256"] == alone(4)


@pytest.mark.long
@pytest.mark.parametrize("which", [-1, 0])
def test_a_node_that_hangs_twice_is_left_out(cluster: Cluster, tmp_path: Path, alone: Weights, which: int) -> None:
    """Also rank 0, which then cannot record it. The control is the first requeue, after one hang."""
    run_dir, hold = tmp_path / "run", tmp_path / "hold"
    hold.touch()
    options = ["--wandb", "disabled", "--checkpoint-every", 0, "--hang-timeout", 5, "--pause", 0.5, "--hold", hold]
    words = recorded(run_dir, *options, epochs=4)
    job = submitted(cluster, "-n", 2, "-g", 2, "--exclude", "node4", "--max-restarts", 0, "--", *words)
    frozen = 0
    for hangs in (1, 2):
        wait_for_step(cluster, job, run_dir, records(run_dir, "start")[-1]["step"] + 2 if frozen else 2, 2 * hangs - 1)
        rank = next(it for it in ranks(cluster)[:: which or 1] if it.node == (frozen or it.node))
        frozen = rank.node
        os.kill(rank.pid, signal.SIGSTOP)
        wait_for_step(cluster, job, run_dir, 1, 2 * hangs)
        assert read(run_dir, "status.json")["wrong_nodes"] == {f"node{frozen}": hangs}
        cluster.slurm("scancel", "--signal=USR2", job)
        cluster.wait_for(job, "PENDING", restarts=hangs)
        if hangs == 1:
            assert left_out(cluster, job) == ["node4"]
    wait_until_left_out(cluster, job, run_dir, f"node{frozen}")
    hold.unlink()
    ended(cluster, job, run_dir)
    assert read(run_dir)["world_sizes"] == [4] * 5
    assert steps_lost(run_dir) == [0, 0, 0, 0]
    assert read(run_dir)["weights_sha256"] == alone(4)


@pytest.mark.long
def test_what_does_not_come_back(cluster: Cluster, tmp_path: Path) -> None:
    """A cancelled job is saved; one with a bug says where; one that gets nowhere gives up. None is requeued again."""
    cancelled, bug, stuck = (tmp_path / name for name in ("cancelled", "bug", "stuck"))
    quiet = ["--wandb", "disabled", "--checkpoint-every", 0]
    two = ["-n", 2, "-g", 1, "--max-restarts", 0]  # nodes, because the one that gives up has another waiting for it
    gets_nowhere = recorded(stuck, *quiet, "--die-at", 1, "--keeper", "off")
    jobs = {
        cancelled: submitted(cluster, "-n", 1, "-g", 1, "--", *recorded(cancelled, *quiet, "--pause", 0.3)),
        bug: submitted(cluster, *two, "--", *recorded(bug, *quiet, "--fail-at", 6, "--failing-rank", 1)),
        stuck: submitted(cluster, *two, "--max-requeues", 1, "--", *gets_nowhere),
    }
    wait_for_step(cluster, jobs[cancelled], cancelled, 2)
    cluster.slurm("scancel", jobs[cancelled])
    assert ended(cluster, jobs[cancelled], cancelled, "CANCELLED")["Restarts"] == "0"
    assert read(cancelled, "status.json")["state"] == "stopped"
    assert read(cancelled, "status.json")["step"] == max(line["step"] for line in records(cancelled, "train"))

    assert ended(cluster, jobs[bug], bug, "FAILED")["Restarts"] == "0"
    assert read(bug, "status.json")["state"] == "failed"
    assert read(bug, "status.json")["reason"].startswith("ZeroDivisionError: a bug in the user's loss")

    assert ended(cluster, jobs[stuck], stuck, "FAILED")["Restarts"] == "2"
    reason = read(stuck, "status.json")["reason"]
    assert reason == "requeued 1 times without finishing a step after step 0 (--max-requeues 1)"


@pytest.mark.long
def test_an_array_trains_one_run_for_each_seed(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "seeds"
    options = recorded(run_dir, "--wandb", "disabled", "--checkpoint-every", 0, "--pause", 0.2)
    array = submitted(cluster, "-g", 1, "--array-seeds", "3:6", "--", *options).partition("_")[0]
    wait_for_step(cluster, f"{array}_2", run_dir / "seed-5", 2)
    cluster.slurm("scancel", "--signal=USR2", f"{array}_2")
    weights = set()
    for number, seed in enumerate((3, 4, 5)):
        shown = ended(cluster, f"{array}_{number}", run_dir / f"seed-{seed}")
        assert shown["Restarts"] == ("1" if seed == 5 else "0")
        weights.add(read(run_dir / f"seed-{seed}")["weights_sha256"])
        assert read(run_dir / f"seed-{seed}" / "slurm", "job.json")["job_id"] == f"{array}_{number}"
    assert len(weights) == 3
    assert steps_lost(run_dir / "seed-5") == [0]


# What one node sees, as JSON.
FACTS = """
import json, os, socket
host, local = socket.gethostname(), os.environ["LOCAL"]
names = {name: socket.gethostbyname(name) for name in ("node1", "node2")}
before = sorted(os.listdir("/dev/shm") + os.listdir(local))
for folder in ("/dev/shm", local):
    open(os.path.join(folder, host), "w").close()
pids = sum(entry.isdigit() for entry in os.listdir("/proc"))
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
print(json.dumps({"host": host, "names": names, "before": before, "pids": pids, "gpus": gpus}))
"""


def test_nodes_share_files_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    tasks = ["srun", "-N4", "--ntasks-per-node=1", "--gpus-per-node=2"]
    env = {"LOCAL": str(cluster.local)}
    for _ in range(2):  # the second time they find what they wrote themselves, and nobody else's
        lines = cluster.slurm(*tasks, sys.executable, str(script), timeout=120, env=env).splitlines()
        facts = {fact["host"]: fact for fact in map(json.loads, lines)}
        assert sorted(facts) == [f"node{node}" for node in cluster.nodes]
    for node, fact in ((node, facts[f"node{node}"]) for node in cluster.nodes):
        assert fact["before"] == [f"node{node}"] * 2
        assert fact["names"]["node1"] == ("127.0.1.1" if node == 1 else cluster.address(1))
        assert fact["names"]["node2"] == ("127.0.1.1" if node == 2 else cluster.address(2))
        assert fact["pids"] < 15, "it sees other processes than the node's"
        assert fact["gpus"] == "0,1"
        assert [file.name for file in cluster.disk(node).iterdir()] == [f"node{node}"]


def test_an_orphan_is_found_and_killed(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "orphan.sh"
    script.write_text("#!/bin/bash\n(setsid sleep 987654 </dev/null >/dev/null 2>&1 &)\n")
    cluster.wait_for(cluster.submit(script, "-N1"), "COMPLETED")
    left = cluster.settle()
    assert [process.command for process in left] == ["sleep: sleep 987654"]
    assert cluster.settle() == []

"""The cluster on which the other tests of this folder stand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cluster.cluster import LAB, UP_LIMIT, Cluster

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


def test_a_node_dies_its_job_is_requeued_and_it_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "wait.sh"
    script.write_text("#!/bin/bash\nsrun --ntasks-per-node=1 sleep 600\n")
    job = cluster.submit(script, "-N2", "--nodelist=node2,node3")
    cluster.wait_for(job, "RUNNING")
    deadline = time.monotonic() + 60
    while not (cluster.processes(2) and cluster.processes(3)):
        assert time.monotonic() < deadline, "no processes on the nodes"
        time.sleep(0.2)

    cluster.kill_node(3, noticed=True)  # test_signals.py waits until Slurm misses it by itself
    assert cluster.processes(3) == []
    cluster.wait_for(job, "PENDING", restarts=1)
    assert cluster.processes(2) == []
    cluster.start_node(3)
    assert cluster.wait_for(job, "RUNNING", restarts=1)["NodeList"] == "node[2-3]"


def test_an_orphan_is_found_and_killed(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "orphan.sh"
    script.write_text("#!/bin/bash\n(setsid sleep 987654 </dev/null >/dev/null 2>&1 &)\n")
    cluster.wait_for(cluster.submit(script, "-N1"), "COMPLETED")
    left = cluster.settle()
    assert [process.command for process in left] == ["sleep: sleep 987654"]
    assert cluster.settle() == []


def test_up_again_keeps_the_cluster_and_another_one_must_wait(cluster: Cluster, tmp_path: Path) -> None:
    before = Path("/run/eklab/record").read_text()
    cluster.up()
    env = os.environ | {"LAB_DIR": str(tmp_path), "LAB_WAIT": "1"}
    other = subprocess.run([str(LAB), "up"], env=env, capture_output=True, text=True, timeout=200)
    assert other.returncode == 1
    assert str(cluster.folder) in other.stderr
    assert subprocess.run([str(LAB), "down"], env=env, timeout=200).returncode == 0
    assert Path("/run/eklab/record").read_text() == before
    assert cluster.slurm("scontrol", "ping").count("UP") == 1


@pytest.mark.parametrize("node", ["0", "5", "x", ""])
def test_a_node_that_is_not_there_is_refused(cluster: Cluster, node: str) -> None:
    with pytest.raises(RuntimeError, match="nodes are 1 to 4"):
        cluster._lab("node-kill", node)


@pytest.mark.timeout(1800)  # another run that waits for a cluster may take its turn in between
def test_a_lab_goes_with_its_owner_and_a_dead_one_is_in_nobodys_way(cluster: Cluster) -> None:
    record = Path("/run/eklab/record")
    os.kill(int(record.read_text().split()[0]), signal.SIGKILL)  # all its processes are gone, all else is still there
    with tempfile.TemporaryDirectory(prefix="eklab-") as folder, subprocess.Popen(["sleep", "600"]) as owner:
        env = os.environ | {"LAB_DIR": folder, "LAB_OWNER": str(owner.pid)}
        subprocess.run([str(LAB), "up", "1", "1"], env=env, check=True, timeout=UP_LIMIT)
        first, *_, recorded = record.read_text().split()
        assert recorded == folder
        assert not cluster.disk(1).exists()
        owner.kill()
        deadline = time.monotonic() + 120
        while Path(folder).exists():
            assert time.monotonic() < deadline, "the lab outlives its owner"
            time.sleep(0.1)
        assert not Path("/proc", first).exists()
        assert not record.exists() or folder not in record.read_text()
    cluster.up()

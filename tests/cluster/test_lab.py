"""The cluster on which the other tests of this folder stand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.cluster.cluster import Cluster

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

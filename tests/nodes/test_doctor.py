"""`evenkeel doctor` where faults need root: mounts of one process, and two nodes."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.processes import LIMIT, read, run

DOCTOR = [sys.executable, "-m", "evenkeel", "doctor", "--json", "--timeout", "60"]


def mounted(first: str, *options: object, expect: int) -> dict[str, str]:
    """The levels of a doctor's findings after some shell in a mount namespace of its own."""
    command = f"{first}\nexec {shlex.join([*DOCTOR, *map(str, options)])}"
    done = run(["unshare", "-m", "sh", "-e", "-c", command], expect=expect)
    return {it["name"]: it["level"] for it in json.loads(done.stdout)["findings"]}


@pytest.mark.long
def test_small_shared_memory_and_a_read_only_and_a_full_run_directory(tmp_path: Path) -> None:
    small, large = (f"mount -t tmpfs -o size={size} shm /dev/shm" for size in ("64m", "2g"))
    where, loaders = ["--run-dir", tmp_path / "run"], ["--", "--num-workers", 2]
    mount = f"mount -t tmpfs -o size=2g disk {tmp_path}"
    levels = mounted(f"{small}\n{mount}\nmount -o remount,ro {tmp_path}", *where, *loaders, expect=1)
    assert (levels["/dev/shm"], levels["space"], levels["run directory"]) == ("FAIL", "WARN", "FAIL")
    fill = f"{mount.replace('2g', '8m')}\ndd if=/dev/zero of={tmp_path}/full bs=1M status=none || true"
    levels = mounted(f"{small}\n{fill}", *where, expect=1)
    assert (levels["/dev/shm"], levels["space"], levels["run directory"]) == ("WARN", "FAIL", "FAIL")
    levels = mounted(f"{large}\n{mount}", *where, *loaders, expect=0)  # the control
    assert levels["/dev/shm"] == "OK"
    assert "FAIL" not in levels.values()


@pytest.mark.parametrize("falsely", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_folder_that_is_not_shared_and_then_the_job(falsely: bool, tmp_path: Path) -> None:
    """The launchers' --doctor on two nodes. Control: the same folder on both."""
    runs = tmp_path / "runs"
    runs.mkdir()
    small = ["--batch-size", "16", "--limit-batches", "4", "--max-steps", "2", "--wandb", "disabled"]
    with Lab(2) as lab:
        if falsely:
            lab.run(1, ["mount", "-t", "tmpfs", "-o", "size=1g", "disk", str(runs)])
        words = ["--doctor", "--", *small, "--run-dir", runs / "run"]
        jobs = [lab.launch(node, "2", tmp_path / f"node{node}.log", *words) for node in lab.nodes]
        codes = [job.wait(timeout=LIMIT) for job in jobs]
        names = [lab.hostname(node) for node in lab.nodes]
    logs = [(tmp_path / f"node{node}.log").read_text() for node in (0, 1)]
    assert codes == [0, 0], "\n".join(logs)
    assert "doctor: " in logs[0]
    assert "doctor: " not in logs[1], "rank 0 speaks for all"
    (line,) = [line for line in logs[0].splitlines() if " shared folder " in line]
    assert line.startswith("WARN" if falsely else "OK")
    assert (names[1] in line) == falsely
    assert read(runs / "run")["step"] == 2


@pytest.mark.long
def test_a_loopback_address_on_two_nodes(tmp_path: Path) -> None:
    """Plain torchruns, which know each other; but the host names, which gloo takes, are 127.0.1.1. Control: above."""
    with Lab(2) as lab:
        head = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
        head += ["--rdzv-backend=c10d", f"--rdzv-endpoint={lab.address(0)}:29500"]
        own = ["-m", "evenkeel", "doctor", "--timeout", "20", "--run-dir", str(tmp_path)]
        jobs = [
            lab.start(node, [*head, f"--rdzv-conf=is_host={1 - node}", *own], tmp_path / f"node{node}.log")
            for node in lab.nodes
        ]
        codes = [job.wait(timeout=LIMIT) for job in jobs]
    logs = "\n".join((tmp_path / f"node{node}.log").read_text() for node in (0, 1))
    assert all(codes), logs
    failed = [line for line in logs.splitlines() if line.startswith("FAIL")]
    assert any("127.0.1.1" in line for line in failed), logs
    assert "GLOO_SOCKET_IFNAME=eth0" in logs or "--local-addr" in logs
    assert "evenkeel/cli/doctor" not in logs, "a traceback of ours; torchrun's own may lose its store"

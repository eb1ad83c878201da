"""The checks of one process, on real files, ports and limits where there are some, else on recorded data."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.cli.doctor import devices, host, network, software, storage
from evenkeel.cli.doctor.collectives import judge_claims, judge_clocks, judge_speeds
from evenkeel.cli.doctor.findings import Finding, Level
from evenkeel.distributed.world import World
from tests.support.processes import free_port
from tests.support.small_files import torchvision_that_needs


def levels(found: Iterator[Finding]) -> dict[str, Level]:
    return {it.name: it.level for it in found}


@pytest.fixture
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for one."""
    monkeypatch.setenv("RES_OPTIONS", "attempts:1 timeout:1")


@pytest.mark.parametrize(
    ("requirement", "level"),
    [("torch==1.9.0", "FAIL"), ("torch (==1.9.0)", "FAIL"), ("torch>=99", "FAIL"), ("torch (>=2.0)", "OK")],
)
def test_torchvision_and_torch(requirement: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_that_needs(tmp_path, requirement)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = software.torchvision()
    assert (found.level, found.value.partition(",")[0]) == (level, "0.10.0")
    assert ("pip install" in found.remedy) == (level == "FAIL")


@pytest.mark.parametrize(("sharded", "level"), [(False, "OK"), (True, "FAIL")])
def test_shard_on_needs_a_newer_torch_and_a_folder_that_all_ranks_see(
    sharded: bool, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.8.0+cpu")
    assert levels(software.versions(sharded))["torch"] == level

    class Blind(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value, ("node1", False)]

    world = Blind(0, 0, 1, 1, torch.device("cpu"), launched=False)
    (found,) = storage.shared(world, tmp_path, sharded)
    assert found.level == (level if sharded else "WARN")
    assert ("--shard on" in found.expected) == sharded


def test_limits_cores_and_keys_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        low = next(it for it in host.limits() if it.name == "limit of open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
        assert levels(host.limits())["limit of open files"] == "OK"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (low.level, low.value) == ("WARN", "512")
    assert low.remedy.startswith("ulimit -n ")
    (many,), (few,) = host.cores(8, 100), host.cores(1, 0)
    assert (many.level, few.level) == ("WARN", "OK")
    assert many.remedy.startswith("export OMP_NUM_THREADS=1")
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert [it.level for it in host.weights_and_biases("online")] == ["WARN"]
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    (found,) = host.weights_and_biases("online")
    assert found.level == "OK"
    assert "secret" not in str(found)


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(levels(software.versions()).values()) == {"OK"}, "the versions here fit"
    monkeypatch.setattr("torch.version.cuda", "13.2")
    assert levels(software.cuda("450.1", "11.0"))["driver"] == "FAIL"
    assert levels(software.cuda("590.1", "13.0"))["driver"] == "OK"
    assert levels(software.cuda("", "")) == {}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ""),
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "GROUP_WORLD_SIZE": "2"}, ""),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_STEP_NUM_NODES": "2", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "GROUP_WORLD_SIZE=1"),
        ({"SLURM_GPUS_ON_NODE": "8", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, "LOCAL_WORLD_SIZE=2"),
        ({"RANK": "0"}, "RANK without torchrun"),
    ],
)
def test_variables_that_contradict_each_other(environ: dict[str, str], said: str) -> None:
    (found,) = host.variables(environ)
    assert found.level == ("WARN" if said else "OK")
    assert said in found.value


@pytest.mark.usefixtures("no_name_server")
def test_the_address_of_node_0() -> None:
    """A port in use; a loopback address, which is wrong for several nodes only; a name that nobody has."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        (taken,) = network.free_port("127.0.0.1", port)
    (free,) = network.free_port("127.0.0.1", port)
    assert (taken.level, free.level) == ("FAIL", "OK")
    assert f"127.0.0.1:{port + 1}" in taken.remedy
    asked = (("127.0.0.1", 2), ("127.0.0.1", 1), ("no-such-host.invalid", 1))
    found = [next(iter(network.master(name, 29500, nodes))).level for name, nodes in asked]
    assert found == ["FAIL", "OK", "FAIL"]


def test_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good one, in which nothing is left; one below a file; and one whose locks do not work."""
    (place := tmp_path / "runs").mkdir()
    found = levels(storage.run_directory(place / "not" / "yet"))
    assert found.keys() == {"space", "run directory"}
    assert "FAIL" not in found.values()
    assert list(place.iterdir()) == []
    (tmp_path / "file").touch()
    assert levels(storage.run_directory(tmp_path / "file" / "run")) == {"run directory": "FAIL"}
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # as on some network file systems: each gets it
    assert levels(storage.run_directory(tmp_path))["run directory"] == "FAIL"


def test_a_full_run_directory(small_disk: Path) -> None:
    size = os.statvfs(small_disk)
    with (small_disk / "full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size.f_bavail * size.f_bsize)
    found = {it.name: it for it in storage.run_directory(small_disk)}
    assert {name: it.level for name, it in found.items()} == {"space": "FAIL", "run directory": "FAIL"}
    assert "No space left" in found["run directory"].value
    assert [path.name for path in small_disk.iterdir()] == ["full"]


def test_two_ranks_on_one_device() -> None:
    twice = judge_claims(["GPU-a", "GPU-b", "GPU-a"])
    assert (twice.level, twice.value) == ("FAIL", "ranks 0, 2 on one device, GPU-a")
    assert twice.remedy.startswith("CUDA_VISIBLE_DEVICES=")
    assert judge_claims(["GPU-a", "GPU-b", ""]).level == "OK"
    shared = judge_claims(["GPU-a", "GPU-a"], allowed=True)
    assert (shared.level, shared.value) == ("WARN", "ranks 0-1 on one device, GPU-a")
    assert "slow" in shared.expected
    assert "--share-gpu" in shared.remedy
    assert judge_claims(["", ""]).level == "OK", "any number of ranks may share a CPU"


def test_clocks_that_differ_and_a_slow_rank() -> None:
    assert [judge_clocks([0.0, apart]).level for apart in (0.1, -1.0, 5.0)] == ["OK", "WARN", "FAIL"]
    assert "rank 1 by up to +5.0 s" in judge_clocks([0.0, 5.0, 0.1]).value
    slow = judge_speeds("matrix products", "GFLOP/s", [40.0, 41.0, 12.0, 39.0], "aabb")
    assert slow.level == "WARN"
    assert slow.expected.endswith("slow: rank 2 on b")
    assert judge_speeds("matrix products", "GFLOP/s", [40.0, 41.0, 30.0, 39.0], "aabb").level == "OK"


def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of nvidia-smi, which says what a real one has said."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\ncase $1 in\n--query-gpu*) echo 0, GPU-1111, NVIDIA X, 81559, 4, 450.51\n"
        "echo 1, GPU-2222, NVIDIA X, 81559, 70001, 450.51; echo some other line ;;\n"
        f"--query-comp*) echo GPU-1111, {os.getppid()}, 70000 ;;\n*) echo '| CUDA Version: 11.0  |' ;;\nesac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("torch.version.cuda", "13.2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {it.name: it for it in devices.gpus()}
    assert found["GPU 0"].value == "NVIDIA X, 4 of 81559 MiB used, GPU-1111"
    assert found["GPU 1"].value == "NVIDIA X, 70001 of 81559 MiB used, GPU-2222"
    assert found["driver"].value == "450.51, for CUDA 11.0"
    told = {name: found[name].level for name in ("driver", "CUDA in torch", "processes on GPUs")}
    assert told == {"driver": "FAIL", "CUDA in torch": "FAIL", "processes on GPUs": "WARN"}
    script.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert levels(devices.gpus()) == {"GPUs": "FAIL"}
    mine = {"gpu_uuid": "GPU-2222", "pid": str(os.getppid()), "used_memory": "70000"}
    left = devices.judge_processes([mine], {"GPU-2222": "1"})
    assert left.level == "WARN"
    assert f"GPU 1: pid {os.getppid()} of " in left.value
    assert str(os.getppid()) in left.remedy
    assert devices.judge_processes([{**mine, "pid": str(os.getpid())}], {}).level == "OK"

"""The main process of a container, run here without a container: signals, orphans, exit codes, refusals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenkeel.common.errors import Refusal
from evenkeel.launch.docker import container_job
from evenkeel.launch.docker.container_job import hold_places, refuse_unwritable, warn_of_small_shm
from evenkeel.launch.topology import refuse_useless_gpus
from evenkeel.resilience.heartbeat import VARIABLE
from tests.support import needs
from tests.support.processes import checked, finish, start


def container(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    """Its main process, in the folder where the image has train.py."""
    command = [sys.executable, "-m", "evenkeel.launch.docker.container", *arguments]
    return start(command, env={VARIABLE: str(tmp_path / "beats")})


def test_help_tells_both_forms(tmp_path: Path) -> None:
    help_ = checked(finish(container(tmp_path)), 0).stdout
    assert "docker run IMAGE --nproc_per_node=2 train.py" in help_
    assert "docker run IMAGE launch -n 2" in help_


def test_names_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    monkeypatch.setattr(container_job, "set_environment", lambda: None)
    with pytest.raises(Refusal, match=r"host name nobody\.invalid does not resolve, as with --network none"):
        container_job.job(["launch"])


def test_two_containers_in_one_place() -> None:
    rendezvous = f"here {os.getpid()}"
    try:
        hold_places(rendezvous, "one")
        with pytest.raises(Refusal, match="another container of this job is on this network as"):
            hold_places(rendezvous, "two")  # another address, the same host name
        hold_places(f"{rendezvous} another job", "one")
    finally:
        while container_job._claims:
            container_job._claims.pop().close()
    hold_places(rendezvous, socket.gethostname())
    container_job._claims.pop().close()


def test_a_small_shm(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_small_shm(0, 64 << 20)
    warn_of_small_shm(2, 8 << 30)
    assert capsys.readouterr().err == ""
    warn_of_small_shm(2, 64 << 20)
    assert "/dev/shm, which has only 64 MB, and die of a bus error" in capsys.readouterr().err


@needs.root("be somebody else")
def test_a_run_directory_of_somebody_else(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1235)
    refuse_unwritable(tmp_path / "runs" / "classify")
    os.setresuid(4242, 0, 0)  # access(2) asks the real user
    try:
        with pytest.raises(Refusal, match=r"user 4242 may not write in .*, which belongs to 1234 .* --user 1234:1235"):
            refuse_unwritable(tmp_path / "runs" / "classify")
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPUs")
def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_useless_gpus(tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(Refusal, match="the driver is too old or broken, or torch is built without CUDA"):
        refuse_useless_gpus(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_useless_gpus(tmp_path)

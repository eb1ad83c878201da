"""The main process of a container, run here without a container: signals, orphans, exit codes, refusals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenkeel import container_job
from evenkeel.agent import KILLED
from evenkeel.config import Config
from evenkeel.container_job import (
    hold_places,
    refuse_nameless,
    refuse_unwritable,
    wait_for_name,
    warn_of_small_shm,
)
from evenkeel.errors import REFUSED, Refusal
from evenkeel.heartbeat import VARIABLE, check
from evenkeel.interruption import STOPPED
from evenkeel.launch import refuse_useless_gpus

from . import processes
from .processes import read, records, start
from .test_train import PLAN, job, wait_for_step

PLAIN = ["--nproc_per_node=2", "train.py"]


def container(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    """Its main process, in the folder where the image has train.py."""
    command = [sys.executable, "-m", "evenkeel.container", *map(str, arguments)]
    return start(command, env={VARIABLE: str(tmp_path / "beats")})


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + processes.LIMIT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_begun(process: subprocess.Popen[str]) -> bool:
    """Whether it has its child, and so keeps signals until it waits for them."""
    return bool(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


@pytest.mark.multiprocess
@pytest.mark.parametrize("form", ["torchrun", "launch"])
def test_a_stop_is_passed_on_and_the_same_command_continues(tmp_path: Path, form: str) -> None:
    run_dir = tmp_path / "run"
    options = job(run_dir, "--pause", 0.05)
    words = [*PLAIN, *options] if form == "torchrun" else ["launch", "-g", 2, "--", *options]
    process = container(tmp_path, *words)
    wait_for_step(run_dir, 3, process)
    until(lambda: "2 ranks, rank 0 in" in check(tmp_path / "beats")[1], process)
    process.send_signal(signal.SIGTERM)
    assert processes.finish(process).returncode == STOPPED
    stopped = read(run_dir, "status.json")
    assert stopped["state"] == "stopped"
    process = container(tmp_path, *words)
    assert processes.finish(process).returncode == 0
    assert [record["step"] for record in records(run_dir, "start")] == [0, stopped["step"]]
    assert read(run_dir)["step"] == PLAN.total_steps


@pytest.mark.multiprocess
def test_a_signal_that_comes_before_anybody_listens_is_not_lost(tmp_path: Path) -> None:
    process = container(tmp_path, *PLAIN)
    until(lambda: has_begun(process), process)
    process.send_signal(signal.SIGTERM)
    done = processes.finish(process)
    assert done.returncode == STOPPED
    assert done.stderr == "evenkeel: stopped by SIGTERM before the job began\n"


@pytest.mark.multiprocess
def test_ranks_that_have_lost_torchrun_may_save_before_the_container_ends(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = container(tmp_path, *PLAIN, *job(run_dir, "--pause", 0.05, "--checkpoint-every", 0))
    wait_for_step(run_dir, 3, process)
    (agent,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(agent), signal.SIGKILL)
    assert processes.finish(process).returncode == KILLED
    status = read(run_dir, "status.json")
    assert status["state"] == "stopped"
    assert (run_dir / "checkpoints" / f"step-{status['step']:08d}").exists() or list(
        (run_dir / "checkpoints").iterdir()
    )


ORPHAN = """
import subprocess, sys, time
from pathlib import Path
pid = subprocess.run(["sh", "-c", "sleep 0.5 & echo $!"], stdout=subprocess.PIPE, text=True).stdout.strip()
deadline = time.monotonic() + 60
while Path("/proc", pid).exists():  # a zombie is still there
    if time.monotonic() > deadline:
        sys.exit(3)
    time.sleep(0.1)
"""


@pytest.mark.multiprocess
def test_orphans_are_buried(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    process = container(tmp_path, "--nproc_per_node=1", tmp_path / "orphan.py")
    assert processes.finish(process).returncode == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([*PLAIN, "--epochz", 5], "Unrecognized options: --epochz, 5; perhaps --epochs? (--help lists all options)"),
        (["check", "launch", "-g", 2, "--", "--lr", -1], "--lr -1.0: must be at least 0"),
        (["--nprocs=2", "train.py"], "unrecognized arguments: --nprocs=2 (torchrun's options, then train.py"),
        (["--nproc_per_node=2", "nothing.py"], "nothing.py: no such file in this container; mount it"),
        (["launch", "-n", "2:1", "-g", 1], "-n 2:1: give a number of nodes, or MIN:MAX with 1 <= MIN <= MAX"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[object], line: str) -> None:
    done = processes.finish(container(tmp_path, *arguments))
    assert done.returncode == REFUSED, done.stderr
    assert done.stderr.startswith(f"evenkeel: {line}")
    assert done.stderr.count("\n") == 1


@pytest.mark.multiprocess
def test_check_starts_nothing(tmp_path: Path) -> None:
    for words in (
        ["check", *PLAIN],
        ["check", "launch", "-n", 2, "-g", 1, "-nr", 1, "--master", "later.invalid", "--"],
    ):
        done = processes.finish(container(tmp_path, *words, "--run-dir", tmp_path / "run"))
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "run").exists()


def test_help_tells_both_forms(tmp_path: Path) -> None:
    done = processes.finish(container(tmp_path))
    assert done.returncode == 0
    assert "docker run IMAGE --nproc_per_node=2 train.py" in done.stdout
    assert "docker run IMAGE launch -n 2" in done.stdout


def test_names_without_an_address() -> None:
    refuse_nameless("localhost")
    with pytest.raises(Refusal, match=r"host name nobody\.invalid does not resolve, as with --network none"):
        refuse_nameless("nobody.invalid")
    wait_for_name("localhost", 0)
    with pytest.raises(Refusal, match=r"--master nobody\.invalid: has had no address for 0 s; is node 0 started\?"):
        wait_for_name("nobody.invalid", 0.0)


def test_two_containers_in_one_place() -> None:
    rendezvous = f"here {os.getpid()}"
    try:
        hold_places(rendezvous, "one")
        with pytest.raises(Refusal, match="another container of this job is on this network as"):
            hold_places(rendezvous, "two")  # another address, the same host name
        hold_places(f"{rendezvous} another job", "one")
    finally:
        while container_job._held:
            container_job._held.pop().close()
    hold_places(rendezvous, socket.gethostname())
    container_job._held.pop().close()


def test_a_small_shm(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_small_shm(0, 64 << 20)
    warn_of_small_shm(2, 8 << 30)
    assert capsys.readouterr().err == ""
    warn_of_small_shm(2, 64 << 20)
    assert "/dev/shm, which has only 64 MB, and die of a bus error" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
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


def test_the_default_run_directory_is_below_the_one_that_the_image_opens() -> None:
    assert Config().resolved().run_dir == Path("runs") / "classify"

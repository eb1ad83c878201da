"""The main process of a container, run here without a container: signals, orphans, exit codes, refusals."""

import os
import signal
from pathlib import Path

import pytest

from evenkeel.common.errors import REFUSED
from evenkeel.launch.agent import KILLED
from evenkeel.resilience.heartbeat import check
from evenkeel.resilience.interruption import STOPPED
from tests.launch.docker.test_docker_run import container
from tests.support.processes import checked, finish, read, stop, wait_beside
from tests.support.small_runs import PLAN, children, job, saved_step, starts, the_line, wait_for_step

PLAIN = ["--nproc_per_node=2", "train.py"]


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


def test_orphans_are_buried(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    checked(finish(container(tmp_path, "--nproc_per_node=1", tmp_path / "orphan.py")), 0)


@pytest.mark.parametrize("form", ["torchrun", "launch"])
def test_a_stop_is_passed_on_and_the_same_command_continues(tmp_path: Path, run_dir: Path, form: str) -> None:
    options = job(run_dir, "--pause", 0.05)
    words = [*PLAIN, *options] if form == "torchrun" else ["launch", "-g", 2, "--", *options]
    process = container(tmp_path, *words)
    wait_for_step(run_dir, 3, process)
    wait_beside(process, lambda: "2 ranks, rank 0 in" in check(tmp_path / "beats")[1], "a beat")
    stop(process, expect=STOPPED)
    stopped = read(run_dir, "status.json")
    assert stopped["state"] == "stopped"
    checked(finish(container(tmp_path, *words)), 0)
    assert starts(run_dir) == [0, stopped["step"]]
    assert read(run_dir)["step"] == PLAN.total_steps


def test_a_signal_that_comes_before_anybody_listens_is_not_lost(tmp_path: Path) -> None:
    process = container(tmp_path, *PLAIN)
    wait_beside(process, lambda: children(process.pid), "its child")  # it keeps signals until it waits for that
    done = stop(process, expect=STOPPED)
    assert done.stderr == "evenkeel: stopped by SIGTERM before the job began\n"


def test_ranks_that_have_lost_torchrun_may_save_before_the_container_ends(tmp_path: Path, run_dir: Path) -> None:
    process = container(tmp_path, *PLAIN, *job(run_dir, "--pause", 0.05, "--checkpoint-every", 0))
    wait_for_step(run_dir, 3, process)
    (agent,) = children(process.pid)
    os.kill(agent, signal.SIGKILL)
    checked(finish(process), KILLED)
    assert read(run_dir, "status.json")["state"] == "stopped"
    assert saved_step(run_dir) >= 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            [*PLAIN, "--epochz", 5],
            "Unrecognized options: --epochz; did you mean --epochs? (--help lists all options)",
        ),
        (["launch", "-g", 2, "--dry-run", "--", "--lr", -1], "--lr -1.0: must be at least 0"),
        (["--nprocs=2", "train.py"], "unrecognized arguments: --nprocs=2 (torchrun's options, then train.py"),
        (["--nproc_per_node=2", "nothing.py"], "nothing.py: no such file in this container; mount it"),
        (["launch", "-n", "2:1", "-g", 1], "-n 2:1: give a number of nodes, or MIN:MAX with 1 <= MIN <= MAX"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[object], line: str) -> None:
    done = checked(finish(container(tmp_path, *arguments)), REFUSED)
    assert the_line(done.stderr).startswith(line)

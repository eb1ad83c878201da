"""The health check of a container: who beats, who is frozen, and who has ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenkeel.common.phases import activity
from evenkeel.resilience import heartbeat
from evenkeel.resilience.heartbeat import VARIABLE, check, scratch, start
from tests.support.processes import environment

BEAT = """
import threading
from evenkeel.resilience import heartbeat
heartbeat.start(3, threading.Event(), 0.0)
threading.Event().wait()
"""


def seen(beats: Path, healthy: bool, text: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        verdict, line = check(beats)
        if verdict == healthy and text in line:
            return line
        assert time.monotonic() < deadline, line
        time.sleep(0.1)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, rank 3, that beats in this folder."""
    process = subprocess.Popen([sys.executable, "-c", BEAT], env=environment({VARIABLE: str(tmp_path)}), text=True)
    yield process
    process.kill()
    process.wait()


def ask(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenkeel.resilience.heartbeat"]
    return subprocess.run(command, env=environment(env), capture_output=True, text=True, timeout=60, check=False)


def test_a_frozen_rank_is_named_and_one_that_has_ended_is_not(
    tmp_path: Path, rank: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(tmp_path, True, "1 rank, rank 3 in start-up of step 1")
    monkeypatch.setattr(heartbeat, "FROZEN_AFTER", 2.5)
    os.kill(rank.pid, signal.SIGSTOP)
    line = seen(tmp_path, False, "rank 3 is frozen: no heartbeat for")
    assert line.endswith(f"last seen in start-up of step 1; process {rank.pid}: it has been stopped (SIGSTOP)")
    os.kill(rank.pid, signal.SIGCONT)
    seen(tmp_path, True, "1 rank")
    rank.kill()
    rank.wait()
    seen(tmp_path, True, "starting: no rank has been training")


def test_the_command_says_it_and_brings_no_torch(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    seen(tmp_path, True, "1 rank")
    done = ask({VARIABLE: str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "evenkeel: 1 rank, rank 3 in start-up of step 1\n")
    done = ask({VARIABLE: str(tmp_path / "nowhere")})
    assert done.returncode == 1
    assert "is `python -m evenkeel.launch.docker.container` running?" in done.stdout
    code = "import sys, evenkeel.resilience.heartbeat; sys.exit(bool({'torch', 'numpy', 'tyro'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_a_rank_that_gets_nowhere_for_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    stopped = threading.Event()
    start(0, stopped, patience=1.5)
    try:
        seen(tmp_path, True, "1 rank, rank 0 in")
        seen(tmp_path, False, "rank 0 has made no progress for")
        activity.enter(activity.phase, patience=60)  # as a slow disk needs
        time.sleep(2)
        seen(tmp_path, True, "1 rank")
    finally:
        activity.enter(activity.phase)
        stopped.set()
    seen(tmp_path, True, "starting")
    assert not list(tmp_path.iterdir()), "a rank that ends takes its file with it"


def test_a_job_in_which_nobody_trains(tmp_path: Path) -> None:
    assert check(tmp_path) == (True, "starting: no rank has been training for 0 s")
    long_ago = time.time() - 1000
    os.utime(tmp_path, (long_ago, long_ago))
    healthy, line = check(tmp_path)
    assert not healthy
    assert line.startswith("no rank has been training for 1000 s")


def test_the_folder_is_found_from_another_process_of_the_container() -> None:
    code = "from evenkeel.resilience.heartbeat import scratch; print(scratch())"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(scratch())

"""Children, and the signals that come while they are started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import wait_until_gone

INTERRUPTED = """
import os, signal, subprocess
from evenkeel.common.processes import start_in_session

os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))  # while Python calls such handlers
try:
    {start}
    print("ignored")
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize(
    ("start", "outcome"),
    [
        ("start_in_session(['sleep', '60'])", "raised"),
        ("subprocess.Popen(['true'], preexec_fn=os.getpid)", "ignored"),  # control: Python prints the error
    ],
)
def test_ctrl_c_while_a_child_is_started_is_not_lost(start: str, outcome: str) -> None:
    """It is raised, the child ends, and its signals are not blocked."""
    code = INTERRUPTED.format(start=start)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == f"{outcome}\n", found.stderr


KILLED = """
import os, signal, time
from evenkeel.common.processes import start_in_session

os.register_at_fork(
    after_in_parent=lambda: os.kill(os.getpid(), signal.SIGKILL),
    after_in_child=lambda: (print(os.getpid(), flush=True), time.sleep(1)),
)
start_in_session(["sleep", "60"])
"""


def test_a_child_ends_although_its_parent_was_killed_before_it_had_begun() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        wait_until_gone([int(process.stdout.readline())], limit=30)


AGENT = """
import os, signal, time
from evenkeel.common.processes import FAILURE, end_agent

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, FAILURE})  # the first as a keeper does
signal.signal(FAILURE, lambda *_: os.kill(keeper, signal.SIGTERM))  # as an agent of ours: it ends what it has started
if not (keeper := os.fork()):
    end_agent(os.getppid(), by=FAILURE)
    os._exit(3)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {FAILURE})  # now its handler knows the keeper
deadline = time.monotonic() + 4
while time.monotonic() < deadline and not (ended := os.waitpid(keeper, os.WNOHANG))[0]:
    time.sleep(0.02)
print(ended[1] >> 8)
if not ended[0]:
    os.kill(keeper, signal.SIGKILL)
"""


def test_a_keeper_that_ends_its_agent_does_not_wait_while_the_agent_waits_for_it() -> None:
    found = subprocess.run([sys.executable, "-c", AGENT], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "3\n", "it waits its five seconds"

"""What keepers tell each other, when the store is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from evenkeel.resilience.peers import Keepers
from tests.support.processes import free_port

SERVE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("looks", [True, False])
def test_a_store_that_has_ended_is_lost_without_a_stack_of_c_plus_plus(
    looks: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The control does not look, and torch prints one."""
    port = str(free_port())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVE, port], **pipes) as server:  # type: ignore[call-overload]
        assert server.stdout.readline() == b"ready\n"
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        peers = Keepers(1, 2)
        peers.join("a")
        assert peers._store
        assert not peers.has_died()
        if not looks:
            monkeypatch.setattr(Keepers, "_is_cut_off", lambda _: False)
        os.kill(server.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert not peers.has_died()
    assert peers._store is None
    assert ("TCPStore" in capfd.readouterr().err) == (not looks)

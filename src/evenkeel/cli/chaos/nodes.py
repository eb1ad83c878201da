"""Several nodes on one machine: each a set of Linux namespaces with its own address and host name.

    with Lab(3) as lab:
        job = lab.popen(1, [sys.executable, "work.py"], cwd=..., env=..., stdout=...)
        lab.signal(job, signal.SIGTERM)  # job itself is nsenter, which forwards nothing
        lab.kill_node(1)                 # a crash: every process of the node is gone, its connections are reset
        lab.start_node(1)                # the same node again, with the same address, empty

Nodes are numbered from 0. They share the file system and the clock; network, host name, process ids, IPC and /dev/shm
are their own. As on a Debian machine, a node's host name resolves to 127.0.1.1 on the node itself, and to nothing on
the others. The switch between them has a namespace of its own, away from the host's firewall and other labs. All names
carry the pid of the process that made the lab; if that is killed, the next lab removes what it has left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...common.processes import start_in_session

TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname", "env")

# A mount namespace is private, so what is mounted here is seen by this node alone.
INIT = """
set -e
hostname "$1"
mount -t tmpfs -o size=1g shm /dev/shm
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" >/dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
echo ready
exec sleep infinity
"""

_labs = itertools.count()


def why_not() -> str | None:
    """The reason why there can be no lab on this machine, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    try:
        with Lab(1):
            return None
    except (RuntimeError, OSError) as error:
        return f"no network namespaces here: {error}"


class Lab:
    """A number of nodes, joined by a switch; see the module."""

    def __init__(self, nodes: int) -> None:
        self.prefix = f"ek{os.getpid()}-{next(_labs)}"
        self.nodes = range(nodes)
        self._inits: dict[int, subprocess.Popen[str]] = {}
        self._jobs: list[subprocess.Popen[Any]] = []
        self._namespaces: list[str] = []

    def address(self, node: int) -> str:
        """The address by which the other nodes reach this one."""
        return f"10.78.0.{11 + node}"

    def hostname(self, node: int) -> str:
        """The node's own name, which the other nodes cannot resolve."""
        return f"{self.prefix}-node{node}"

    def __enter__(self) -> Lab:
        try:
            for name, maker in re.findall(r"^(ek(\d+)-\S+)", ip("netns", "list"), re.MULTILINE):
                if not Path("/proc", maker).exists():  # it was killed, and its processes with it
                    ip("netns", "del", name)
            switch = self._namespace("switch")
            ip("-n", switch, "link", "add", "br0", "type", "bridge")
            ip("-n", switch, "link", "set", "br0", "up")
            for node in self.nodes:
                space = self._namespace(f"node{node}")
                ip("-n", switch, "link", "add", f"p{node}", "type", "veth", "peer", "name", "eth0", "netns", space)
                ip("-n", switch, "link", "set", f"p{node}", "master", "br0", "up")
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "eth0", "up")
                self.start_node(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_node(self, node: int) -> None:
        """Boot a node: start its first process, whose death ends all others of the node."""
        init = start_in_session(
            ["ip", "netns", "exec", f"{self.prefix}-node{node}"]
            + ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
            + ["sh", "-c", INIT, "init", self.hostname(node)],
            signal.SIGKILL,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._inits[node] = init
        assert init.stdout is not None
        if init.stdout.readline() != "ready\n":
            init.kill()
            raise RuntimeError(f"cannot start a node: {init.communicate()[1].strip()}")

    def kill_node(self, node: int) -> None:
        """Crash a node: SIGKILL to its first process, and so to all of them."""
        init = self._inits.pop(node)
        self.signal(init, signal.SIGKILL)
        init.communicate(timeout=20)

    def popen(self, node: int, argv: Sequence[str], cwd: Path | str = "/", **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a node. It ends with the node, with the lab, and with this process."""
        (init,) = _children(self._inits[node].pid)
        inside = ["nsenter", f"--target={init}", "--net", "--uts", "--ipc", "--pid", "--mount"]
        command = [*inside, "env", f"--chdir={cwd}", *argv]
        job = start_in_session(command, signal.SIGKILL, stdin=subprocess.DEVNULL, **options)
        self._jobs.append(job)
        return job

    def signal(self, job: subprocess.Popen[Any], number: signal.Signals) -> None:
        """Send a signal to what :meth:`popen` started."""
        for child in _children(job.pid):
            send(child, number)

    def close(self) -> None:
        """Remove everything; may be called at any time, and twice."""
        for node in list(self._inits):
            self.kill_node(node)
        for job in self._jobs:
            job.kill()  # nsenter outlives a killed node only by a moment
            job.wait(timeout=20)
        while self._namespaces:
            ip("netns", "del", self._namespaces.pop())

    def _namespace(self, name: str) -> str:
        ip("netns", "add", f"{self.prefix}-{name}")
        self._namespaces.append(f"{self.prefix}-{name}")
        return self._namespaces[-1]


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def ip(*arguments: str) -> str:
    """What a command of ip(8) prints."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)  # noqa: S607  (wherever it is)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _children(pid: int) -> list[int]:
    """The child processes of a single-threaded process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []

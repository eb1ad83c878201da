"""A container engine of the tests' own: a daemon with its own data, sockets and network, gone without a trace.

The daemon lives in namespaces of its own, so that the machine's network, mounts and containers are left alone. An image
has to be built in the machine's network, where the package index is; containers run in a network where there is nobody
else. So the daemon is started twice, on the same data.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from evenkeel.common.processes import die_with_parent, process_name
from tests.support import processes
from tests.support.processes import environment, wait_until

BASE = "python:3.11-slim-bookworm"
"""What the Dockerfile asks for. There may be no registry here, so it is made from Debian's packages."""

SYSTEM_PATH = f"/usr/bin:/usr/sbin:/sbin:{os.environ['PATH']}"
"""The client must be the daemon's: another one, without its plugin for builds, refuses BuildKit."""

TOOLS = {
    "dockerd": "docker.io", "docker": "docker.io", "mmdebstrap": "mmdebstrap", "docker-compose": "docker-compose",
    "unshare": "util-linux", "ip": "iproute2",
}  # fmt: skip

PREFIX = "evenkeel-engine-"
wait_for = partial(wait_until, every=0.2)


def why_not() -> str:
    """The reason why there can be no engine on this machine, or nothing."""
    if os.geteuid() != 0:
        return "a container engine of one's own needs root"
    missing = {package for tool, package in TOOLS.items() if shutil.which(tool, path=SYSTEM_PATH) is None}
    return f"not installed: {', '.join(sorted(missing))}" if missing else ""


class Engine:
    """One daemon, on a folder of its own."""

    def __init__(self) -> None:
        _remove_leftovers()
        self.home = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.env = {"DOCKER_HOST": f"unix://{self.home}/socket", "PATH": SYSTEM_PATH, "DOCKER_CONFIG": str(self.home)}
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self, *, own_network: bool) -> None:
        """Start the daemon, and wait until it answers.

        Raises:
            RuntimeError: it does not; with the end of its log.
        """
        folders = [f"--data-root={self.home}/data", f"--exec-root={self.home}/exec", f"--pidfile={self.home}/pid"]
        options = ["--storage-driver=overlay2", "--iptables=false", "--ip6tables=false", "--ip-masq=false"]
        # nobody answers at this address, so a look-up fails at once; the machine's name servers are out of reach
        no_names = ["--dns=127.0.0.1", "--dns-opt=timeout:1", "--dns-opt=attempts:1"]
        options += no_names if own_network else ["--bridge=none", "--ip-forward=false"]
        up = "ip link set lo up && " if own_network else ""
        self._daemon = subprocess.Popen(
            ["unshare", "--mount", *(["--net"] if own_network else []), "--propagation", "private",
             "sh", "-c", f'{up}exec dockerd "$@"', "sh", *folders, *options, "-H", self.env["DOCKER_HOST"]],
            env=environment(self.env),
            stdout=(self.home / "log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while self.docker("version", expect=None).returncode:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd does not start: {(self.home / 'log').read_text()[-1500:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._daemon:
            self._daemon.terminate()
            self._daemon.wait(timeout=60)
            self._daemon = None

    def remove(self) -> None:
        if self._daemon and self._daemon.poll() is None:
            names = self.docker("ps", "-aq", expect=None).stdout.split()
            if names:
                self.docker("rm", "-f", *names, expect=None)
            self.stop()
        _remove(self.home)

    def docker(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """The same of the client."""
        return self.command("docker", *arguments, **options)

    def command(
        self, *words: object, expect: int | None = 0, limit: float = 120, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run something that talks to this daemon, and check its exit code (None: any)."""
        return processes.run([str(word) for word in words], env=self.env | (env or {}), limit=limit, expect=expect)

    def inspect(self, name: str) -> dict:
        """What the daemon knows of a container or an image."""
        (facts,) = json.loads(self.docker("inspect", name).stdout)
        return dict(facts)

    def logs(self, name: str) -> str:
        done = self.docker("logs", name)
        return done.stdout + done.stderr

    def ended(self, name: str, limit: float = 240) -> int:
        """Wait until a container has ended and is not started again; its exit code."""

        def exited() -> bool:
            return bool(self.inspect(name)["State"]["Status"] == "exited")

        wait_for(exited, f"the end of {name}", limit, lambda: self.logs(name)[-4000:])
        return int(self.inspect(name)["State"]["ExitCode"])

    def ranks(self, name: str) -> dict[int, int]:
        """Rank -> pid, as the machine sees it, of what trains in a running container."""
        found = {}
        waiting = [int(self.inspect(name)["State"]["Pid"])]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):  # it has ended meanwhile
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    waiting += map(int, (thread / "children").read_text().split())
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK=")]
                below = [r for r in ranks if r not in found or process_name(found[r]) == "keeper"]
                found.update(dict.fromkeys(below, pid))
        return found

    def import_base(self) -> None:
        """Make the base image: Debian's smallest with Python in it."""
        tar = self.home / "base.tar"
        packages = "--include=ca-certificates,python3,python3-venv,python3-pip"
        self.command("mmdebstrap", "--variant=minbase", packages, "bookworm", tar, limit=600)
        self.docker("import", tar, BASE)
        tar.unlink()

    def build(self, name: str, context: Path, *options: str) -> float:
        """Build the image as docs/docker.md says; the seconds that took."""
        begun = time.monotonic()
        build = ["build", "--network", "host", "-f", context / "docker" / "Dockerfile", "-t", name, *options, context]
        self.docker(*build, limit=900, env={"DOCKER_BUILDKIT": "1"})
        return time.monotonic() - begun


def _remove(home: Path) -> None:
    """A daemon's folder; it may still be letting go of it."""
    for _ in range(20):
        shutil.rmtree(home, ignore_errors=True)
        if not home.exists():
            return
        time.sleep(0.5)


def _remove_leftovers() -> None:
    for home in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if not Path(f"/proc/{home.name.removeprefix(PREFIX).partition('-')[0]}").exists():
            _remove(home)


@contextlib.contextmanager
def engine_for_the_tests() -> Iterator[Engine]:
    """An engine that ends with the block, whatever happens in it."""
    engine = Engine()
    try:
        yield engine
    finally:
        engine.remove()

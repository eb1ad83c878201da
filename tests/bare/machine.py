"""A bare machine: Debian's smallest root file system with Python, its venv and make, and an ordinary user.

    python -m tests.bare.machine make test

copies this checkout's files there and runs a command in them. There is no git, ip, ps, compiler or browser, and no
root. Of this machine there are the kernel, the processors and, on request, the network.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.copies import copy_files
from tests.support.pip import certificates, pip_configuration

PACKAGES = "python3,python3-venv,make"
TOOLS = ("mmdebstrap", "unshare", "setpriv", "mount", "chroot")
HOME = "home/user"
USER = 1000
ENVIRONMENT = {"HOME": f"/{HOME}", "USER": "user", "PATH": "/usr/local/bin:/usr/bin:/bin"}

# what a kernel and an init system give to any machine; the shell becomes the first process of the namespace
START = """
set -e
root=$1 user=$2 folder=$3; shift 3
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
for name in null zero full random urandom tty; do
  touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"  # pip's 3 GB of downloads need no disk
ln -s pts/ptmx "$root/dev/ptmx"
for pair in fd: stdin:/0 stdout:/1 stderr:/2; do ln -s "/proc/self/fd${pair#*:}" "$root/dev/${pair%%:*}"; done
hostname bare
command -v ip >/dev/null && ip link set lo up
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --inh-caps=-all \\
  sh -c 'cd "$1"; shift; exec "$@"' sh "$folder" "$@"
"""


def why_not() -> str | None:
    """The reason why there can be no such machine here, or None."""
    if os.geteuid() != 0:
        return "a root file system of one's own needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Machine:
    """A root file system with a copy of this checkout in it, and what can be run there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkout = root / HOME / "evenkeel"
        include = f"--include={PACKAGES}"
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", include, "bookworm", str(root)], check=True)
        with (root / "etc" / "passwd").open("a") as file:
            file.write(f"user:x:{USER}:{USER}::/{HOME}:/bin/sh\n")
        (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 bare\n")
        shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
        copy_files(self.checkout)
        self._hand_in_pip()
        for folder, _, files in os.walk(root / HOME):
            for path in (folder, *(f"{folder}/{file}" for file in files)):
                os.lchown(path, USER, USER)

    def run(self, *command: str, network: bool) -> int:
        """Run a command in the checkout as the user; its exit code. Without a network there is the loopback alone."""
        namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", *([] if network else ["--net"])]
        return subprocess.run(
            ["unshare", *namespaces, "sh", "-c", START, "sh", str(self.root), str(USER), f"/{HOME}/evenkeel", *command],
            env=ENVIRONMENT | {"PATH": f"{ENVIRONMENT['PATH']}:/usr/sbin:/sbin"},
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode

    def _hand_in_pip(self) -> None:
        """pip finds its index as it does on this machine."""
        folder = self.root / HOME / ".config" / "pip"
        folder.mkdir(parents=True)
        text = f"{pip_configuration()}no-cache-dir = true\n"
        if ca := certificates():
            shutil.copy(ca, folder / "ca.crt")
            text += f"cert = /{HOME}/.config/pip/ca.crt\n"
        (folder / "pip.conf").write_text(text)


@contextlib.contextmanager
def bare_machine() -> Iterator[Machine]:
    """A machine that is gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-bare-") as folder:
        yield Machine(Path(folder) / "root")


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"no bare machine here: {reason}")
    with bare_machine() as machine:
        sys.exit(machine.run(*(sys.argv[1:] or ["sh"]), network=True))

"""A real Slurm cluster for tests, made by `lab.sh`: its commands, its nodes, and what it leaves behind."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from evenkeel.common.processes import stat
from evenkeel.launch.slurm.jobs import ENDED
from tests.support.processes import ROOT, environment, wait_until

LAB = Path(__file__).with_name("lab.sh")
TOOLS = ("slurmctld", "slurmd", "slurmdbd", "sbatch", "munged", "mariadbd", "ip", "unshare", "nsenter")
SLURMS_OWN = ("slurmd", "slurmstepd")
UP_LIMIT = 600.0
"""Seconds for the lab to come up, another one's end included; more than its LAB_WAIT."""
LINGER = 5.0
"""Seconds in which a process must be gone after the end of its job; it may be dying, or slurmd's login shell."""

_PROBE = """
set -e
ip link add br0 type bridge
ip link add left type veth peer name right
mount -t tmpfs none /mnt
mknod /mnt/device c 1 3
"""


def why_not() -> str | None:
    """The reason why there can be no cluster on this machine, or None."""
    if os.geteuid() != 0:
        return "a Slurm cluster of virtual nodes needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; run: tests/cluster/lab.sh install"
    own = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run([*own, "sh", "-c", _PROBE], capture_output=True, text=True, timeout=60)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else None


class Process(NamedTuple):
    node: int
    pid: int
    command: str


class Cluster:
    """So many nodes, node1 to nodeN, with 2 pretend GPUs each. Partitions: see lab.sh.

    It ends with this process, however that ends.
    """

    def __init__(self, nodes: int = 4, cpus: int = 2) -> None:
        self.nodes = range(1, nodes + 1)
        self.cpus = cpus
        self.folder = Path(tempfile.mkdtemp(prefix="eklab-"))

    @property
    def local(self) -> Path:
        """On a node: a folder of its own disk, which outlives its crash. Outside: an empty one."""
        return self.folder / "local"

    def disk(self, node: int) -> Path:
        """Where the machine sees a node's :attr:`local`."""
        return self.folder / "disk" / f"node{node}"

    def address(self, node: int) -> str:
        """The address by which the other nodes reach this one; it itself takes its name for 127.0.1.1."""
        return f"10.79.0.{10 + node}"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a user on the login node has, who has set nothing; evenkeel is this working tree's."""
        private = re.compile("(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SCANCEL|LAB|PYTEST)_")
        unset = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME")
        kept = {k: v for k, v in environment().items() if not private.match(k) and k not in unset}
        return {
            **kept,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            **(extra or {}),
        }

    def up(self) -> None:
        """Bring it up, after the end of another one; where it is up, bring back dead nodes."""
        self._lab("up", str(len(self.nodes)), str(self.cpus), limit=UP_LIMIT)

    def down(self) -> None:
        """Remove everything; may be called twice."""
        self._lab("down")
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill_node(self, node: int) -> None:
        """Crash a node: SIGKILL to everything on it. Slurm takes it for down by itself after about 30 s."""
        self._lab("node-kill", str(node))

    def drain(self, *nodes: int) -> None:
        """Keep new jobs off some nodes."""
        self.slurm("scontrol", "update", f"nodename={_names(nodes)}", "state=drain", "reason=test")

    def resume(self, *nodes: int) -> None:
        self.slurm("scontrol", "update", f"nodename={_names(nodes)}", "state=resume")

    def _lab(self, *arguments: str, limit: float = 150) -> None:
        env = os.environ | {"LAB_DIR": str(self.folder), "LAB_OWNER": str(os.getpid())}
        done = subprocess.run([str(LAB), *arguments], env=env, capture_output=True, text=True, timeout=limit)
        if done.returncode:
            raise RuntimeError(f"lab.sh {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")

    def slurm(
        self,
        *argv: str,
        timeout: float = 60,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """What one of Slurm's commands prints, with ``env`` added to :meth:`environment`. RuntimeError: it failed and
        ``check`` is true."""
        own = self.environment(env)
        done = subprocess.run(argv, env=own, capture_output=True, text=True, timeout=timeout, cwd=cwd)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, script: Path, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a batch script and return its job id. Its output goes beside it, to ``NAME.JOB.log``.

        ``env`` is added to the job's environment. The option --export=ALL,NAME=VALUE would have Slurm 22.05 start a
        login shell on the node (as --get-user-env does), which takes its time and changes PATH.
        """
        log = f"--output={script.with_suffix('')}.%j.log"
        done = self.slurm("sbatch", "--parsable", log, "--open-mode=append", *options, str(script), env=env)
        return done.strip().partition(";")[0]

    def show(self, job: str) -> dict[str, str]:
        """What the controller knows of a job: JobState, Restarts, Reason, NodeList, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.slurm("scontrol", "-o", "show", "job", job)))

    def wait_for(self, job: str, *states: str, limit: float = 120, restarts: int = 0) -> dict[str, str]:
        """Wait until a job is in one of these states, requeued so often or more; without states: until it ended."""
        wanted = states or ENDED

        def there() -> dict[str, str] | None:
            shown = self.show(job)
            if shown["JobState"] in wanted and int(shown["Restarts"]) >= restarts:
                return shown
            assert shown["JobState"] not in ENDED, f"job {job} ended {shown['JobState']} instead of {wanted}\n{shown}"
            return None

        return wait_until(there, f"job {job} {wanted}", limit, lambda: self.show(job), every=0.2)

    def processes(self, node: int) -> list[Process]:
        """All live processes on a node but Slurm's own: those that its first process has begotten."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            known = stat(int(entry.name))
            if known and known.state != "Z":
                children.setdefault(known.parent, []).append(int(entry.name))
        found = [Process(node, pid, _command(pid)) for pid in _descendants(self._init(node), children)]
        return [process for process in found if process.command and not process.command.startswith(SLURMS_OWN)]

    def processes_left(self) -> list[Process]:
        """The same on all nodes that are up."""
        return [process for node in self.nodes for process in self.processes(node)]

    def _init(self, node: int) -> int | None:
        """The first process of a node; None if it is dead."""
        try:
            pid, started = (self.folder / "run" / f"node{node}.init").read_text().split()
        except OSError:
            return None
        known = stat(int(pid))
        return int(pid) if known and known.started == int(started) else None

    def settle(self, limit: float = 120) -> list[Process]:
        """Cancel all jobs, bring all nodes back, and wait until all are idle. Returns orphans: processes that
        no job owns any more, which have been killed now."""
        self.slurm("scancel", "--user=root", check=False)
        self.up()
        self._wait("an empty queue", limit, lambda: not self.slurm("squeue", "--noheader", "--states=all", "-t", _LIVE))
        for node in self.nodes:
            if "DRAIN" in self.node_state(node) or "DOWN" in self.node_state(node):
                self.resume(node)
        self._wait("idle nodes", limit, lambda: all(self.node_state(node) == "IDLE" for node in self.nodes))
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.processes_left(), "the end of all processes", LINGER, every=0.2)
        left = self.processes_left()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return left

    def node_state(self, node: int) -> str:
        """Such as IDLE or DOWN+NOT_RESPONDING."""
        shown = self.slurm("scontrol", "-o", "show", "node", f"node{node}")
        found = re.search(r"State=(\S+)", shown)
        return found[1] if found else ""

    def _wait(self, what: str, limit: float, done: Callable[[], bool]) -> None:
        wait_until(done, what, limit, lambda: self.slurm("squeue") + self.slurm("sinfo", "-N"), every=0.2)


_LIVE = "PENDING,RUNNING,SUSPENDED,COMPLETING,CONFIGURING,REQUEUED,RESIZING,SIGNALING,STAGE_OUT,STOPPED"


def _names(nodes: Sequence[int]) -> str:
    return ",".join(f"node{node}" for node in nodes)


def _descendants(pid: int | None, children: Mapping[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, []) if pid else []:
        yield child
        yield from _descendants(child, children)


def _command(pid: int) -> str:
    """A process's command line, with the name of its program first; empty if it has ended."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink().name
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f"{program}: {line}"

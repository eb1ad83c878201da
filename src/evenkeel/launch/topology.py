"""From a topology to the exact ``torchrun`` command. All launchers use this.

Three settings decide whether a job survives its machines. They can only be set from outside, by options and environment
of torchrun's agent:

* Agents must not share one store over all restarts. Workers would read addresses of a dead attempt, and a node that
  joins would wait for an address that nobody publishes again.
* The agent must give its workers time for a snapshot before it kills them.
* A lost node must be noticed in seconds; at torch's defaults it takes three quarters of a minute.

torchrun orders the nodes itself, by their addresses sorted as strings. The node rank here only decides which node hosts
the rendezvous: node 0, so every other node must be able to reach it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..common.arguments import GPUS_HIDDEN, LARGEST_WORLD
from ..common.errors import Refusal
from ..common.network import Link
from ..common.processes import AGENT_SIGNALS, count_cores

DEFAULT_PORT = 29500

CPU_PROCESSES = 2  # on a machine without GPUs: the fewest ranks that really communicate

JOIN_SECONDS = 600  # how long the nodes wait for each other, at the start and after a loss

# From a signal to SIGKILL. A snapshot must be done in 25 s, because at a restart torch kills after 30 s and
# this cannot be changed; the rest is for loaders, trackers and the interpreter to end.
SHUTDOWN_SECONDS = 45

# A node counts as lost when it has sent no heartbeat for 5 x 1 s (torch: 3 x 5 s). A slow node that counts as lost
# does no harm, its ranks go on. But a heartbeat has its sender's clock time, so the clocks of the nodes must agree
# to less than that. The last call (torch: 30 s) is how long an elastic job that has its minimum number of
# nodes waits for more. The survivors of a loss look once a second, so 2 s gather them all.
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Topology:
    """How many nodes and ranks a job has, and which node this is. Refuses impossible ones."""

    gpus: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    master_host: str = ""  # empty for one node
    master_port: int = DEFAULT_PORT
    run_id: str = ""
    max_restarts: int = 3
    join_seconds: int = JOIN_SECONDS

    @property
    def nodes(self) -> str:
        """``N`` or ``MIN:MAX``, as -n and --nnodes take it."""
        return f"{self.min_nodes}" + (f":{self.max_nodes}" if self.max_nodes != self.min_nodes else "")

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.max_nodes:
            raise Refusal(f"-nr {self.node_rank}: with -n {self.nodes} a node rank is in 0..{self.max_nodes - 1}")
        if self.max_nodes > 1 and not self.master_host:
            raise Refusal(f"--master is missing: -n {self.nodes} needs the address of node 0, HOST or HOST:PORT")
        if not 1 <= self.master_port <= 65535:
            raise Refusal(f"--master: port {self.master_port} is not in 1..65535")


def parse_nodes(text: str) -> tuple[int, int]:
    """Read ``N`` or ``MIN:MAX``."""
    counts = re.fullmatch("([0-9]{1,5})(?::([0-9]{1,5}))?", text)
    least, most = (int(counts[1]), int(counts[2] or counts[1])) if counts else (0, 0)
    if not 1 <= least <= most:
        raise Refusal(f"-n {text}: give a number of nodes, or MIN:MAX with 1 <= MIN <= MAX")
    return least, most


def parse_master(text: str) -> tuple[str, int]:
    """Read ``HOST`` or ``HOST:PORT``, with an IPv6 address in brackets."""
    master = re.fullmatch(r"(\[[\w:.%]+\]|[\w-]{1,63}(?:\.[\w-]{1,63})*\.?)(?::([0-9]{1,9}))?", text)
    if not master:
        raise Refusal(f"--master {text}: give HOST or HOST:PORT, with an IPv6 address in brackets")
    return master[1].strip("[]"), int(master[2] or DEFAULT_PORT)


def endpoint(host: str, port: int) -> str:
    """``HOST:PORT``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Command:
    """A command line, and the variables it adds to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def __str__(self) -> str:
        """One line to paste into a shell."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.env.items()), shlex.join(self.argv)])

    def explained(self) -> str:
        """For --dry-run: as a comment the command with plain torchrun, and last the one that is run, for a shell."""
        signals = ",".join(number.name for number in AGENT_SIGNALS)
        torchrun_here = str(Path(sys.executable).with_name("torchrun"))
        plain = Command((torchrun_here, *self.argv[3:]), {**self.env, "PET_SIGNALS_TO_HANDLE": signals})
        return (
            "# plain torchrun, whose exit code is 1 after any failure:\n"
            f"# {plain}\n"
            "# the same by evenkeel's agent, whose exit code says how the job ended (0, 75, 2, 137):\n"
            f"{self}"
        )

    def execute(self) -> NoReturn:
        """Become the command: signals reach it directly, and its exit status is ours."""
        sys.stdout.flush()
        os.execvpe(self.argv[0], self.argv, {**os.environ, **self.env})  # noqa: S606


def torchrun(
    topology: Topology,
    link: Link,
    script: Path,
    train_args: Sequence[str],
    *,
    cores: int = 0,
    environ: Mapping[str, str] = os.environ,
    log_dir: Path | None = None,
) -> Command:
    """The command that starts this node's share of the job.

    Args:
        topology: which ranks, and where they meet.
        link: how the other nodes reach this one.
        script: what each rank runs.
        train_args: its options.
        cores: CPU cores of this node for this job; 0: all that this process may use.
        environ: the user's environment; its values stay, except for the store variable, which restarts need.
        log_dir: for tracebacks of ranks; None: torchrun's temporary folder.
    """
    env = _environment(topology, link, cores or count_cores())
    options = _options(topology, link) | ({"--log-dir": str(log_dir)} if log_dir else {})
    # "--", or argparse takes a train option for an abbreviation of torchrun's own; "$$", because torchrun
    # expands templates like ${local_rank} in the arguments.
    job = ["--", *(argument.replace("$", "$$") for argument in (str(script), *train_args))]
    return Command(
        argv=(sys.executable, "-m", "evenkeel.launch.agent", *(word for it in options.items() for word in it), *job),
        env={k: v for k, v in env.items() if k not in environ or k == OWN_STORE},
    )


def _environment(topology: Topology, link: Link, cores: int) -> dict[str, str]:
    """Environment variables of the agent and its ranks."""
    env = {
        OWN_STORE: "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        "OMP_NUM_THREADS": str(max(1, cores // topology.gpus)),
    }
    if topology.max_nodes > topology.min_nodes:
        env[LARGEST_WORLD] = str(topology.max_nodes * topology.gpus)
    if link.interface:
        # Gloo binds to whatever the host name resolves to, often 127.0.1.1. NCCL looks at the interfaces.
        env["GLOO_SOCKET_IFNAME"] = link.interface
    return env


def _options(topology: Topology, link: Link) -> dict[str, str]:
    """torchrun's options: which ranks, and where they meet."""
    # Port 0: the kernel chooses the store's port, so two jobs on one machine cannot collide. Several nodes must know
    # the port beforehand.
    host, port = (topology.master_host, topology.master_port) if topology.master_host else ("127.0.0.1", 0)
    options = {
        "--nnodes": topology.nodes,
        "--nproc-per-node": str(topology.gpus),
        "--max-restarts": str(topology.max_restarts),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": endpoint(host, port),
        # the same on all nodes, which may write the host in different ways
        "--rdzv-id": topology.run_id or (f"evenkeel-{port}" if port else "evenkeel"),
        # torch would guess is_host from the host name, and fail if that resolves to another address
        "--rdzv-conf": (f"is_host={int(topology.node_rank == 0)},join_timeout={topology.join_seconds},{RENDEZVOUS}"),
    }
    if link.address:
        # becomes MASTER_ADDR if this node has rank 0; the default is its host name, which others may not know
        options["--local-addr"] = link.address
    return options


def refuse_useless_gpus(device: Path = Path("/dev/nvidiactl")) -> None:
    """Refuse to train silently on the CPU if torch cannot use the machine's GPUs.

    Args:
        device: exists if this machine or container has GPUs.
    """
    if not device.exists() or os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in GPUS_HIDDEN:
        return
    import torch

    from ..distributed.devices import refuse_missing

    if not torch.cuda.is_available():
        refuse_missing(0, device)
        raise Refusal(
            f"there are GPUs here, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use them: "
            "the driver is too old or broken, or torch is built without CUDA; fix that (docs/docker.md), or set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )

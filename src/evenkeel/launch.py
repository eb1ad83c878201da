"""From a topology to the exact ``torchrun`` command: the one place that knows its options.

The launchers for one node and for several, Slurm and Docker all end here. Four things that decide whether a
job survives its machines can only be set from outside, in the command line and environment of the agent:

* agents must not share one store over all restarts: workers would read a dead attempt's addresses, and a node
  that joins would wait for an address that nobody publishes again;
* the agent must forward USR1 and USR2, or a cluster's warning kills it and orphans the workers;
* it must leave the workers time for a snapshot before it kills them;
* a lost node must be noticed in seconds: at torch's defaults it takes three quarters of a minute.

The order of the nodes is torchrun's own: it numbers them by their addresses, sorted as strings. The node rank
given here says one thing only: node 0 hosts the rendezvous, so every other node must be able to reach it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .errors import Refusal
from .network import Link
from .processes import survives_the_terminal

DEFAULT_PORT = 29500
CPU_PROCESSES = 2  # on a machine without GPUs: the least at which ranks really talk to each other
LARGEST_WORLD = "EVENKEEL_LARGEST_WORLD"  # the variable that tells ranks of an elastic job how many they may become
JOIN_SECONDS = 600  # how long the nodes wait for each other, at the start and after a loss

# From a signal to SIGKILL. A snapshot must be done in 25 s, because at a restart torch kills after 30 s and
# nothing moves that; here loaders, trackers and the interpreter get time to end as well.
SHUTDOWN_SECONDS = 45

# A node is lost when it has sent no heartbeat for 5 x 1 s (torch: 3 x 5 s). To take a slow node for lost is
# harmless, its ranks go on; but a heartbeat carries its sender's clock time, so the clocks of the nodes must
# agree to less than that. The last call (torch: 30 s) is how long an elastic job that has its least number of
# nodes waits for more. The survivors of a loss look once a second, so 2 s gather them all.
RENDEZVOUS = f"join_timeout={JOIN_SECONDS},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Topology:
    """How many nodes and ranks a job has, and which node this is; refuses what cannot be."""

    gpus: int
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    master_host: str = ""  # empty for one node: then nobody else has to find it
    master_port: int = DEFAULT_PORT
    run_id: str = ""
    max_restarts: int = 3

    @property
    def nodes(self) -> str:
        """The number of nodes as it is typed."""
        return _as_typed(self.min_nodes, self.max_nodes)

    def __post_init__(self) -> None:
        check_size(self.gpus, self.min_nodes, self.max_nodes)
        if not 0 <= self.node_rank < self.max_nodes:
            raise Refusal(f"-nr {self.node_rank}: with -n {self.nodes} a node rank is in 0..{self.max_nodes - 1}")
        if self.max_nodes > 1 and not self.master_host:
            raise Refusal(f"--master is missing: -n {self.nodes} needs the address of node 0, HOST or HOST:PORT")
        if not 1 <= self.master_port <= 65535:
            raise Refusal(f"--master: port {self.master_port} is not in 1..65535")
        if self.max_restarts < 0:
            raise Refusal(f"--max-restarts {self.max_restarts}: must be 0 or more")


def check_size(gpus: int, min_nodes: int, max_nodes: int) -> None:
    """Refuse numbers of processes and nodes that cannot be."""
    if gpus < 1:
        raise Refusal(f"-g {gpus}: a node needs at least one process")
    if not 1 <= min_nodes <= max_nodes:
        typed = _as_typed(min_nodes, max_nodes)
        raise Refusal(f"-n {typed}: give a number of nodes, or MIN:MAX with 1 <= MIN <= MAX")


def _as_typed(min_nodes: int, max_nodes: int) -> str:
    """``N`` or ``MIN:MAX``."""
    return f"{min_nodes}" + (f":{max_nodes}" if max_nodes != min_nodes else "")


def parse_nodes(text: str) -> tuple[int, int]:
    """Read ``N`` or ``MIN:MAX``."""
    counts = re.fullmatch("([0-9]{1,5})(?::([0-9]{1,5}))?", text)
    if not counts:
        raise Refusal(f"-n {text}: give a number of nodes, or MIN:MAX")
    return int(counts[1]), int(counts[2] or counts[1])


def parse_master(text: str) -> tuple[str, int]:
    """Read ``HOST`` or ``HOST:PORT``, with an IPv6 address in brackets."""
    master = re.fullmatch(r"(\[[\w:.%]+\]|[\w-]{1,63}(?:\.[\w-]{1,63})*\.?)(?::([0-9]{1,9}))?", text)
    if not master:
        raise Refusal(f"--master {text}: give HOST or HOST:PORT, with an IPv6 address in brackets")
    return master[1].strip("[]"), int(master[2] or DEFAULT_PORT)


@dataclass(frozen=True)
class Command:
    """A command line, and the variables that it adds to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def __str__(self) -> str:
        """Return it as one line to paste into a shell."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.env.items()), shlex.join(self.argv)])

    def execute(self) -> NoReturn:
        """Become the command: signals go straight to it, and its exit status is ours."""
        sys.stdout.flush()
        os.execvpe(self.argv[0], self.argv, {**os.environ, **self.env})  # noqa: S606


def torchrun(
    topology: Topology,
    link: Link,
    script: Path,
    train_args: Sequence[str],
    *,
    cores: int,
    environ: Mapping[str, str],
    log_dir: Path | None = None,
) -> Command:
    """Turn a topology into the command that starts this node's share of the job.

    What the user has set in ``environ`` stays, all but the store variable: no restart survives without it.

    Args:
        topology: which ranks, and where they meet.
        link: how the others reach this node.
        script: what each rank runs.
        train_args: its options.
        cores: of this node, for this job.
        environ: of the command.
        log_dir: where ranks leave their tracebacks; None: in a folder that nobody looks into.
    """
    # Port 0: the agent that hosts the store lets the kernel choose while it binds, so two jobs on one machine
    # cannot collide. Several nodes have to know the port beforehand.
    host, port = (topology.master_host, topology.master_port) if topology.master_host else ("127.0.0.1", 0)
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        "OMP_NUM_THREADS": str(max(1, cores // topology.gpus)),
    }
    if topology.max_nodes > topology.min_nodes:
        env[LARGEST_WORLD] = str(topology.max_nodes * topology.gpus)
    if link.interface:
        # Gloo binds to whatever the host name resolves to, often 127.0.1.1. NCCL looks at the interfaces.
        env["GLOO_SOCKET_IFNAME"] = link.interface
    agent = [sys.executable, "-m", "evenkeel.agent"]  # torchrun with an exit code that says how the job ended here
    options = {
        "--nnodes": topology.nodes,
        "--nproc-per-node": str(topology.gpus),
        "--max-restarts": str(topology.max_restarts),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        # All nodes must agree on it, and may write the host in different ways.
        "--rdzv-id": topology.run_id or (f"evenkeel-{port}" if port else "evenkeel"),
        # Said outright: torch would guess from the host name, and fail where that resolves to something else.
        "--rdzv-conf": f"is_host={int(topology.node_rank == 0)},{RENDEZVOUS}",
    }
    if link.address:
        # Becomes MASTER_ADDR when this node has rank 0; the default is its host name, unknown to the others.
        options["--local-addr"] = link.address
    if log_dir:
        options["--log-dir"] = str(log_dir)
    if _torchrun_has("--signals-to-handle"):
        nohup = survives_the_terminal(os.getpid())
        options["--signals-to-handle"] = ",".join(s for s in SIGNALS if not (nohup and s == "SIGHUP"))
    # "--", or argparse takes a train option for an abbreviation of torchrun's own; "$$", because torchrun
    # expands templates like ${local_rank} in the arguments.
    job = ["--", *(argument.replace("$", "$$") for argument in (str(script), *train_args))]
    return Command(
        argv=(*agent, *(word for option in options.items() for word in option), *job),
        env={k: v for k, v in env.items() if k not in environ or k == "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"},
    )


def _torchrun_has(option: str) -> bool:
    """Look into torchrun's source: torch 2.8 has fewer options, and importing it takes seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise Refusal("torch is not installed; run: make setup")
    return option in (Path(torch.origin).parent / "distributed" / "run.py").read_text()


def count_processes(asked: int | None, each: int = 1) -> int:
    """Return how many processes to start here.

    Args:
        asked: -g: GPUs to use; without any GPU here, processes. None: all GPUs.
        each: GPUs that a process takes.

    Raises:
        Refusal: there are not as many GPUs, or they do not divide.
    """
    import torch  # takes seconds: not before the cheap refusals

    from .devices import explain_devices

    refuse_useless_gpus()
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is None and not present:
        print(f"evenkeel: no GPU here: {CPU_PROCESSES} processes on the CPU; -g sets how many", file=sys.stderr)
        return CPU_PROCESSES
    if not present:
        return asked or CPU_PROCESSES  # they share the CPU
    wanted = present if asked is None else asked
    if max(wanted, each) > present:
        typed = "" if asked is None else f"-g {asked}: "
        raise Refusal(typed + explain_devices(max(1, wanted // each), present, each))
    if asked is not None and asked % each:
        raise Refusal(
            f"-g {asked}: each process takes {each} GPUs (--place or --model-parallel); use a multiple of that"
        )
    return wanted // each


def refuse_useless_gpus(device: Path = Path("/dev/nvidiactl")) -> None:
    """Refuse GPUs that are here and that torch cannot use: it would say nothing and train on the CPU.

    Args:
        device: is there if this machine has GPUs, or if they have been handed to this container.
    """
    if not device.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    import torch

    from .devices import refuse_missing

    if not torch.cuda.is_available():
        refuse_missing(0, device)
        raise Refusal(
            f"there are GPUs here, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use them: "
            "the driver is too old or broken, or torch is built without CUDA; mend that (docs/docker.md), or set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )

"""The command line of ``docker/run.py``: from a topology to the exact ``docker run`` or ``podman run`` command.

What happens in the container, :mod:`evenkeel.container` decides: only there it is known which network and which GPUs
there are. Here is what only the outside can give: devices, mounts, limits, and who comes back after which end.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from uuid import uuid4

import tyro

from .config import number_in
from .errors import REFUSED, Refusal
from .launch import SHUTDOWN_SECONDS, Command, Topology
from .launchers import MultiNode, parse_arguments

APP = "/app"
"""The working directory in the image; train.py lies there, and below it runs/ and data/."""

RETURNS = 5
"""How often the engine may start a container again. It cannot tell exit codes apart, and only 0 is final to it, so
that a job refused at the last moment (2) is asked as often again, in a few seconds. After 75, 137 and 1 it goes on."""

PASSED_ON = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT", "NCCL_", "OMP_NUM_")
"""How variables begin that go into the container, by name alone: their values never stand in a command line."""


@dataclass(frozen=True)
class Host:
    """What of this machine decides the command."""

    uid: int
    gid: int
    root: bool
    """Whether the engine is called by root."""
    gpus: bool
    infiniband: bool
    lockable: bool
    """Whether a process here may be allowed to lock all its memory."""
    shm: int
    """Bytes of /dev/shm."""

    @staticmethod
    def here(runs: Path, devices: Path = Path("/dev")) -> Host:
        """This machine and this user.

        Args:
            runs: folder for runs. When root types the command, and not by sudo, its owner counts instead.
            devices: where devices are.
        """
        uid, gid = os.getuid(), os.getgid()
        if uid == 0:
            ids = (("SUDO_UID", uid), ("SUDO_GID", gid))
            uid, gid = (number_in(name, 0, 2**32 - 2) if name in os.environ else known for name, known in ids)
        if uid == 0 and runs.is_dir():
            uid, gid = runs.stat().st_uid, runs.stat().st_gid
        return Host(
            uid=uid,
            gid=gid,
            root=os.geteuid() == 0,
            gpus=(devices / "nvidiactl").exists(),
            infiniband=(devices / "infiniband").is_dir(),
            lockable=_may_lock_memory(),
            shm=shutil.disk_usage("/dev/shm").total,  # noqa: S108
        )


def _may_lock_memory() -> bool:
    """Whether the limit can be lifted. A daemon's own limits cannot be seen, but are not below those of its host."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        return True
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    return bool(int(effective.split()[1], 16) >> 24 & 1)  # CAP_SYS_RESOURCE


@dataclass(frozen=True)
class ContainerNode(MultiNode):
    """Start one node's share of a training job in a container. What comes after -- goes to train.py as it is.

      docker/run.py -g 4 -- --epochs 5                                     one node
      docker/run.py -n 2 -g 4 -nr 0 --master node0 -- --epochs 5           on the first of two nodes
      docker/run.py -n 2 -g 4 -nr 1 --master node0 -- --epochs 5           on the second
      docker/run.py -g 4 --detach --name tide -- --epochs 5                in the background, and back after a reboot

    The command waits for the container, passes signals on, and ends with its exit code: 0 finished, 75 stopped and can
    be continued, 2 refused. Files in the run directory belong to whoever types it.
    """

    script: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """Run this file of yours instead of train.py."""
    image: Annotated[str, tyro.conf.arg(metavar="NAME")] = "evenkeel"
    """What `docker build -t NAME` was given."""
    engine: Literal["docker", "podman"] = "docker"
    """Which program to call."""
    runs: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder for the runs; made if it is not there, and runs/ in the container."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder with data; data/ in the container, where it cannot be written."""
    add: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = ()
    """More files or folders, such as a task's file; beside train.py in the container, where they cannot be written."""
    network: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """host, or a network of the engine's. Default: host for several nodes, else the engine's default."""
    name: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """A name for the container."""
    shm_size: Annotated[str, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = ""
    """Size of /dev/shm in the container, such as 8g; `host` shares the machine's (--ipc=host). Default: as large."""
    detach: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Leave it in the background and print its id; the engine restarts it, but not after `docker stop`."""


def command(typed: ContainerNode, train_args: Sequence[str], host: Host, environ: Mapping[str, str]) -> Command:
    """Turn a command line into the engine's.

    Args:
        typed: the launcher's options.
        train_args: train.py's.
        host: this machine.
        environ: of this process.

    Raises:
        Refusal: what was typed cannot be.
    """
    topology = typed.topology(1 if typed.gpus is None else typed.gpus)
    options = [
        *_identity(typed, host),
        *_confinement(),
        *_network(typed, topology),
        *_devices(typed.engine, host, environ),
        *_memory(typed, host),
        *_mounts(typed),
        *_environment(environ),
        # from `docker stop` to SIGKILL: torchrun's own limit, and time for the rest
        f"--stop-timeout={SHUTDOWN_SECONDS + 15}",
        *(["--detach", f"--restart=on-failure:{RETURNS}"] if typed.detach else ["--rm"]),
    ]
    return Command((typed.engine, "run", *options, typed.image, *_launch(typed), "--", *train_args), {})


def preflight(run: Command, image: str) -> tuple[str, ...]:
    """The same container, only to refuse what it would refuse: before a container that comes back is made of it.

    Args:
        run: as :func:`command` made it.
        image: where in it the container's own arguments begin.
    """
    cut = run.argv.index(image) + 1
    left_out = ("--detach", "--restart=", "--name=")
    options = [word for word in run.argv[:cut] if not word.startswith(left_out)]
    return (*options[:2], "--rm", *options[2:], "check", *run.argv[cut:])


def _launch(typed: ContainerNode) -> list[str]:
    """The container's own arguments, for :mod:`evenkeel.container`."""
    words = ["launch"]
    for option, value in (
        ("-n", typed.nodes if typed.nodes != "1" else None),
        ("-g", typed.gpus),
        ("-nr", typed.node_rank),
        ("--master", typed.master),
        ("--run-id", typed.run_id or None),
        ("--max-restarts", typed.max_restarts),
        ("--script", typed.script and typed.script.name),
    ):
        if value is not None:
            words += [option, str(value)]
    return words


def _identity(typed: ContainerNode, host: Host) -> list[str]:
    """Whose files they will be."""
    options = [f"--user={host.uid}:{host.gid}"]
    if typed.engine == "podman" and not host.root:
        options.append("--userns=keep-id")  # without root, the engine's 0 is this user and all others are nobody
    return options + ([f"--name={typed.name}"] if typed.name else [])


def _confinement() -> list[str]:
    """Nothing can be written but the mounts and /tmp, which may hold what compilers make, to be executed."""
    return [
        "--read-only",
        "--tmpfs=/tmp:rw,exec,mode=1777",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
    ]


def _network(typed: ContainerNode, topology: Topology) -> list[str]:
    network = typed.network or ("host" if topology.max_nodes > 1 else "")
    options = [f"--network={network}"] if network else []
    if network not in ("", "host") and topology.master_host and topology.node_rank == 0:
        options.append(f"--network-alias={topology.master_host}")  # by which the other containers find it
    return options


def _devices(engine: str, host: Host, environ: Mapping[str, str]) -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES says, and InfiniBand with the leave to lock memory that it needs."""
    options = []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if host.gpus and visible != "":
        chosen = visible.split(",") if visible else ["all"]
        if engine == "podman":
            options += [f"--device=nvidia.com/gpu={gpu}" for gpu in chosen]
        else:
            options.append("--gpus=all" if chosen == ["all"] else f'--gpus="device={visible}"')
    if host.infiniband:
        options.append("--device=/dev/infiniband")
        if host.lockable:
            options.append("--ulimit=memlock=-1:-1")
    return options


def _memory(typed: ContainerNode, host: Host) -> list[str]:
    if typed.shm_size == "host":
        return ["--ipc=host"]
    return [f"--shm-size={typed.shm_size or f'{host.shm >> 20}m'}"]


def _mounts(typed: ContainerNode) -> list[str]:
    mounts = [_mount(typed.runs, "runs", writable=True)]
    if typed.data:
        if not typed.data.is_dir():
            raise Refusal(f"--data {typed.data}: no such folder")
        mounts.append(_mount(typed.data, "data"))
    for path in (*typed.add, *([typed.script] if typed.script else [])):
        if not path.exists():
            raise Refusal(f"{path}: no such file or folder")
        mounts.append(_mount(path, path.name))
    return mounts


def _mount(path: Path, name: str, writable: bool = False) -> str:
    source = str(path.resolve())
    if "," in source or '"' in source:
        raise Refusal(f"{source}: engines cannot mount a path with a comma or a quotation mark")
    return f"--mount=type=bind,source={source},target={APP}/{name}" + ("" if writable else ",readonly")


def _environment(environ: Mapping[str, str]) -> list[str]:
    """By name: the engine takes the value from its own environment, and nobody sees it in a list of processes."""
    names = sorted(name for name in environ if name.startswith(PASSED_ON))
    # one launch over all returns, so that --fresh starts over only once
    return [*(f"--env={name}" for name in names), f"--env=EVENKEEL_LAUNCH={uuid4().hex}"]


def make_runs(runs: Path, host: Host) -> None:
    """Make the folder for runs, as the user's: the engine would make it root's."""
    made = [path for path in (runs, *runs.parents) if not path.exists()]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for path in made:
            os.chown(path, host.uid, host.gid)
    except OSError as error:
        raise Refusal(f"--runs {runs}: cannot be made: {error.strerror}; name another folder") from None


def main(argv: Sequence[str]) -> int:
    """Check what can be checked here, then become the engine's client; return only if there is nothing to run."""
    try:
        typed, train_args = parse_arguments(ContainerNode, argv)
        assert isinstance(typed, ContainerNode)
        host = Host.here(typed.runs)
        run = command(typed, train_args, host, os.environ)
        if typed.dry_run:
            print(run)
            return 0
        if shutil.which(typed.engine) is None:
            raise Refusal(f"--engine {typed.engine}: is not installed; see docs/docker.md")
        make_runs(typed.runs, host)
    except Refusal as refusal:
        print(f"evenkeel: {refusal}", file=sys.stderr)
        return REFUSED
    if typed.detach:
        checked = subprocess.run(preflight(run, typed.image), stdout=sys.stderr, check=False)
        if checked.returncode:
            return checked.returncode
    return run.execute()

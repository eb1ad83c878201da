"""The command line of ``docker/run.py``: from a topology to the exact ``docker run`` or ``podman run`` command.

It sets what can only be set from outside: devices, mounts, limits, restarts. `container` decides the rest inside, where
the network and the GPUs are known.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import tyro

from ...common.arguments import GPUS_HIDDEN, flag, number_in
from ...common.display import say, show
from ...common.errors import Refusal
from ...config import Flag
from ...run.records import read_config
from ..launchers import PASSED_ON, MultiNode, parse_arguments
from ..topology import SHUTDOWN_SECONDS, Command

# Maximum restarts of a container by the engine. It does not distinguish exit codes: only 0 is final, so a job that is
# refused at the last moment (2) is restarted too, within seconds. After 75, 137 and 1 the run continues.
RETURNS = 5


@dataclass(frozen=True)
class Host:
    """The facts about this machine and user that the command depends on."""

    uid: int
    gid: int
    root: bool  # the engine is called by root
    gpus: bool
    infiniband: bool
    lockable: bool  # a process here may lock all its memory
    shm: int  # bytes of /dev/shm; 0: there is none

    @staticmethod
    def here(runs: Path, devices: Path = Path("/dev")) -> Host:
        """This machine and this user; for root without sudo, the owner of the folder for runs."""
        uid, gid = os.getuid(), os.getgid()
        if uid == 0:
            ids = (("SUDO_UID", uid), ("SUDO_GID", gid))
            uid, gid = (number_in(name, 0, 2**32 - 2) if name in os.environ else known for name, known in ids)
        if uid == 0 and runs.is_dir():
            uid, gid = runs.stat().st_uid, runs.stat().st_gid
        # a daemon's own limits are not visible, but are not below those of its host
        unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY
        capabilities, shm = None, 0
        with suppress(OSError):  # macOS has neither
            capabilities = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
            shm = shutil.disk_usage("/dev/shm").total  # noqa: S108
        return Host(
            uid=uid,
            gid=gid,
            root=os.geteuid() == 0,
            gpus=(devices / "nvidiactl").exists(),
            infiniband=(devices / "infiniband").is_dir(),
            lockable=unlimited or bool(capabilities and int(capabilities[1], 16) >> 24 & 1),  # CAP_SYS_RESOURCE
            shm=shm,
        )


@dataclass(frozen=True)
class ContainerNode(MultiNode):
    """Start one node's part of a training job in a container. Options after -- are passed to train.py.

      docker/run.py -g 4 -- --epochs 5                                     one node
      docker/run.py -n 2 -g 4 -nr 0 --master node0 -- --epochs 5           on the first of two nodes
      docker/run.py -n 2 -g 4 -nr 1 --master node0 -- --epochs 5           on the second
      docker/run.py -g 4 --detach --name tide -- --epochs 5                in the background, restarted after a reboot

    The command waits for the container, forwards signals, and ends with its exit code: 0 finished, 75 stopped and can
    be continued, 2 refused. You own the files in the run directory, even if the engine runs as root.
    """

    image: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """Name of the image (`docker build -t NAME`). Default: the project's name in pyproject.toml."""
    engine: Literal["docker", "podman"] = "docker"
    """Container engine to call."""
    runs: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder for runs, mounted as runs/; created if it does not exist."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder with data, mounted read-only as data/."""
    add: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = ()
    """More files or folders, such as a task's file, mounted read-only beside train.py."""
    env: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ()
    """More environment variables to pass on, such as AWS_ACCESS_KEY_ID for --mirror; WANDB_*, NCCL_* are passed on."""
    network: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """host, or a network of the engine. Default: host for several nodes, else the engine's default."""
    name: Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ""
    """Name of the container."""
    shm_size: Annotated[str, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = ""
    """Size of /dev/shm in the container, such as 8g; `host` shares the machine's (--ipc=host). Default: same size."""
    detach: Flag = False
    """Run in the background and print the container's id. The engine restarts it, but not after `docker stop`."""


def command(typed: ContainerNode, train_args: Sequence[str], host: Host, environ: Mapping[str, str]) -> Command:
    """The engine's command line, or a Refusal; `environ` is this process's environment."""
    topology = typed.topology
    if typed.doctor and typed.detach:
        raise Refusal("--doctor --detach: every restart would check again; check once without --detach")
    podman = typed.engine == "podman"
    shm = typed.shm_size or (f"{host.shm >> 20}m" if host.shm else "")
    options = [
        f"--user={host.uid}:{host.gid}",
        "--read-only",
        "--tmpfs=/tmp:rw,exec,mode=1777",  # exec: for compiled code
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        *(["--ipc=host"] if typed.shm_size == "host" else [f"--shm-size={shm}"] if shm else []),
        f"--stop-timeout={SHUTDOWN_SECONDS + 15}",  # from `docker stop` to SIGKILL
        *(["--detach", f"--restart=on-failure:{RETURNS}"] if typed.detach else ["--rm"]),
    ]
    if podman and not host.root:
        options.append("--userns=keep-id")  # else user 0 inside is this user, and all others are nobody
    if typed.name:
        options.append(f"--name={typed.name}")
    if network := typed.network or ("host" if topology.max_nodes > 1 else ""):
        options.append(f"--network={network}")
        if network != "host" and topology.master_host and topology.node_rank == 0:
            options.append(f"--network-alias={topology.master_host}")  # by which the other containers find it
    visible = environ.get("CUDA_VISIBLE_DEVICES", "all")
    gpus = host.gpus and visible.strip() not in GPUS_HIDDEN
    if gpus and podman:
        options += [f"--device=nvidia.com/gpu={gpu}" for gpu in visible.split(",")]
    elif gpus:
        options.append("--gpus=all" if visible == "all" else f'--gpus="device={visible}"')
    if host.infiniband:
        options += ["--device=/dev/infiniband", *(["--ulimit=memlock=-1:-1"] if host.lockable else [])]
    options.append(_mount(typed.runs, "runs", writable=True))
    if typed.data:
        if not typed.data.is_dir():
            raise Refusal(f"--data {typed.data}: no such folder")
        options.append(_mount(typed.data, "data"))
    for path in (*typed.add, *([typed.script] if typed.script else [])):
        if not path.exists():
            raise Refusal(f"{path}: no such file or folder")
        options.append(_mount(path, path.name))
    options += _passed_on(typed.env, environ)
    options.append(f"--env=EVENKEEL_LAUNCH={uuid4().hex}")  # one launch over all restarts: --fresh starts over once
    inside = replace(typed, script=typed.script and Path(typed.script.name))
    launch = [word for it in fields(MultiNode) for word in _typed(it.name, getattr(inside, it.name), it.default)]
    return Command(
        (typed.engine, "run", *options, typed.image or project_name(), "launch", *launch, "--", *train_args), {}
    )


def _passed_on(names: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Variables by name: the engine takes the values from its environment, so that no process list shows them."""
    for name in names:
        if name not in environ:
            raise Refusal(f"--env {name.partition('=')[0]}: is not set here; export it, and give only its name")
    passed = {*names, *(name for name in environ if name.startswith(PASSED_ON))}
    return [f"--env={name}" for name in sorted(passed)]


def project_name() -> str:
    """The name in the pyproject.toml of the script's project, else of the working folder's; else this package's."""
    for folder in (Path(sys.argv[0]).absolute().parent.parent, Path.cwd()):
        path = folder / "pyproject.toml"
        project = read_config(path).get("project") if path.is_file() else None
        if isinstance(project, dict) and isinstance(project.get("name"), str):
            return str(project["name"])
    return __name__.partition(".")[0]


def _typed(name: str, value: Any, default: Any) -> list[str]:
    """An option as it is typed; nothing if it has its default."""
    return [] if value == default else [flag(name)] if value is True else [flag(name), str(value)]


def _mount(path: Path, name: str, writable: bool = False) -> str:
    source = str(path.resolve())
    if "," in source or '"' in source:
        raise Refusal(f"{source}: engines cannot mount a path with a comma or a quotation mark")
    return f"--mount=type=bind,source={source},target=/app/{name}" + ("" if writable else ",readonly")


def make_runs(runs: Path, host: Host) -> None:
    """Make the folder for runs, owned by the user; the engine would make it as root."""
    made = [path for path in (runs, *runs.parents) if not path.exists()]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for path in made:
            os.chown(path, host.uid, host.gid)
    except OSError as error:
        raise Refusal(f"--runs {runs}: cannot create it: {error.strerror}; name another folder") from None


def main(argv: Sequence[str]) -> int:
    """Check the options, then become the engine's client; return only if there is nothing to run."""
    typed, train_args = parse_arguments(ContainerNode, argv)
    host = Host.here(typed.runs)
    run = command(replace(typed, dry_run=False), train_args, host, os.environ)
    if typed.dry_run:
        show(str(run))
        if not host.gpus:  # the line may be copied to another machine
            say("no GPU here, so the line gives the container none; print it where it runs", to_stderr=True)
        return 0
    if shutil.which(typed.engine) is None:
        raise Refusal(f"--engine {typed.engine}: is not installed; see docs/docker.md")
    make_runs(typed.runs, host)
    if typed.detach:  # check everything before a container exists that restarts
        trial = command(replace(typed, detach=False, name="", dry_run=True), train_args, host, os.environ)
        checked = subprocess.run(trial.argv, stdout=subprocess.DEVNULL, check=False)
        if checked.returncode:
            return checked.returncode
    return run.execute()

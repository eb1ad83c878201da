"""The job in a container: refused if it would hang or die for an obscure reason, else run by torchrun."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ...common.display import show
from ...common.errors import Refusal
from ...common.network import Unanswered, Waiting
from ...config import Config
from ...resilience import heartbeat
from ...resilience.interruption import STOPPED
from .. import agent
from ..launchers import MultiNode, check_train_options, doctor_says, parse_arguments, prepare, wait_for_master
from ..topology import OWN_STORE, SHUTDOWN_SECONDS, refuse_useless_gpus

TRAIN = Path("train.py")  # in the image it is in the working directory

# Bytes of /dev/shm below which loader processes are likely to run out. Docker's default is 64 MB.
SMALL_SHM = 256 << 20

_claims: list[socket.socket] = []
"""Stay open as long as this process lives."""


def job(arguments: list[str]) -> int:
    """Check the job and run it; returns its exit code. For the arguments see `container`."""
    set_environment()
    name = socket.gethostname()
    if not resolves(name):
        raise Refusal(
            f"this container's host name {name} does not resolve, as with --network none, and torchrun would hang; "
            f"give it a network, or --add-host {name}:127.0.0.1 if all ranks are in here"
        )
    try:
        return _launch(arguments[1:]) if arguments[0] == "launch" else _torchrun(arguments)
    except Unanswered as missing:  # not 2: an engine or a cluster starts this node again when node 0 may be there
        print(f"evenkeel: {missing}", file=sys.stderr, flush=True)
        return STOPPED


def _launch(arguments: list[str]) -> int:
    """With the options of launch/multi_node.py."""
    topology = (typed := parse_arguments(MultiNode, arguments)[0]).topology
    if topology.master_host and not typed.dry_run:
        wait_for_name(topology.master_host, topology.join_seconds)
    start = prepare(arguments, TRAIN)
    check_host(start.config)
    if typed.dry_run:
        show(start.command.explained())
        return 0
    if start.topology.max_nodes > 1:
        hold_places(f"{topology.master_port} {topology.run_id}", start.link.address)
    wait_for_master(start.topology, start.fetches)
    if typed.doctor and (code := doctor_says(start.command, start.config is not None)):
        return code
    os.environ.update(start.command.env)
    return agent.main(list(start.command.argv[3:]))  # in this process, which has imported torch


def _torchrun(arguments: list[str]) -> int:
    """With torchrun's own options."""
    from torch.distributed.run import get_args_parser

    def refuse(complaint: str) -> NoReturn:
        raise Refusal(f"{complaint} (torchrun's options, then train.py and its own; --help lists both forms)")

    parser: Any = get_args_parser()
    parser.error = refuse
    parsed = parser.parse_args(arguments)
    script, config = Path(parsed.training_script), None
    if not (parsed.module or parsed.no_python):
        if not script.is_file():
            raise Refusal(f"{script}: no such file in this container; mount it, or give train.py")
        if script.resolve() == TRAIN.resolve():
            config = check_train_options(parsed.training_script_args)
    check_host(config)
    if parsed.nnodes not in ("1", "1:1") and parsed.rdzv_backend == "c10d":
        hold_places(f"{parsed.rdzv_endpoint} {parsed.rdzv_id}", parsed.local_addr or socket.getfqdn())
    return agent.main(arguments)


def set_environment() -> None:
    """Set what torchrun and its workers need, unless the user has; a user id without a name has no home."""
    beats = heartbeat.folder()
    beats.mkdir(parents=True, exist_ok=True)
    for old in beats.glob("rank-*"):
        old.unlink(missing_ok=True)
    os.environ[heartbeat.VARIABLE] = str(beats)
    writable = heartbeat.scratch() / "home"
    if not os.access(os.environ.get("HOME", "/"), os.W_OK):
        os.environ["HOME"] = str(writable)
    if "TMPDIR" not in os.environ and not os.access("/tmp", os.W_OK):  # noqa: S108
        os.environ["TMPDIR"] = str(writable)
    writable.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("USER", str(os.getuid()))
    os.environ.setdefault(OWN_STORE, "1")  # both as the launchers do
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    if re.fullmatch("[0-9a-f]{12}", socket.gethostname()):
        # the container's id, which outlives its restarts: they are one launch, so --fresh starts over only once
        os.environ.setdefault("EVENKEEL_LAUNCH", f"container {socket.gethostname()}")


def resolves(name: str) -> bool:
    """Whether a host name has an address."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def wait_for_name(host: str, seconds: float) -> None:
    """Wait until node 0's name has an address: engines give it one while it runs, clusters a moment later."""
    deadline, waiting = time.monotonic() + seconds, Waiting()
    while not resolves(host):
        if time.monotonic() > deadline:
            raise Unanswered(f"--master {host}: has no address after {seconds:.0f} s; is node 0 started?")
        waiting.say(lambda: f"waiting for the address of node 0, {host}")
        time.sleep(0.25)


def check_host(config: Config | None) -> None:
    """Check this container's devices and mounts; `config` has train.py's options, None if unknown."""
    refuse_useless_gpus()
    if config:
        assert config.run_dir is not None  # resolved
        refuse_unwritable(config.run_dir)
        warn_of_small_shm(config.num_workers, shutil.disk_usage("/dev/shm").total)  # noqa: S108


def refuse_unwritable(run_dir: Path) -> None:
    """Refuse a run directory in which this user cannot write, and name its owner."""
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if os.access(place, os.W_OK | os.X_OK):
        return
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        raise Refusal(f"--run-dir {run_dir}: {place.absolute()} is read-only; mount a writable folder there")
    owner = place.stat()
    raise Refusal(
        f"--run-dir {run_dir}: user {os.getuid()} may not write in {place.absolute()}, which belongs to {owner.st_uid} "
        f"({stat.filemode(owner.st_mode)}); start the container with --user {owner.st_uid}:{owner.st_gid}, or give the "
        "mounted folder to this user"
    )


def warn_of_small_shm(num_workers: int, size: int) -> None:
    """Warn that loader processes will run out of /dev/shm; `size` in bytes."""
    if num_workers and size < SMALL_SHM:
        print(
            f"evenkeel: --num-workers {num_workers}: loaders pass their batches through /dev/shm, which has only "
            f"{size >> 20} MB, and die of a bus error when it is full; start the container with --ipc=host or "
            "--shm-size 8g",
            file=sys.stderr,
            flush=True,
        )


def hold_places(rendezvous: str, address: str) -> None:
    """Refuse if another container of this job has the same address or host name; else claim both until the end.

    torch identifies nodes by address and process number, our watch for hangs by host name and process number. Two
    containers on the host's network have the same names, and often the same small process numbers, so they are
    confused. An abstract socket is visible to all containers that share a network, as an address is.
    """
    for known_as in sorted({address, socket.gethostname()}):
        name = hashlib.sha256(f"{rendezvous} {known_as}".encode()).hexdigest()
        place = socket.socket(socket.AF_UNIX)
        try:
            place.bind(f"\0evenkeel/{name}")
        except OSError:
            raise Refusal(
                f"another container of this job is on this network as {known_as}; torchrun may confuse the two, "
                "and hang; start one container with all the ranks, or put both on a network of their own: "
                "docker network create NAME, then --network NAME"
            ) from None
        _claims.append(place)

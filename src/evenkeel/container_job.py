"""What a container is asked to run: refused where it would hang or die in a riddle, else it becomes torchrun."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import socket
import stat
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, cast

from . import heartbeat
from .config import Config
from .errors import Refusal
from .launch import JOIN_SECONDS, SHUTDOWN_SECONDS, refuse_useless_gpus

TRAIN = Path("train.py")
"""In the image it lies in the working directory."""

SMALL_SHM = 256 << 20
"""Bytes of /dev/shm below which loader processes are likely to run out of it. Docker gives 64 MB."""

_held: list[socket.socket] = []
"""Open as long as this process lives."""


def job(arguments: list[str]) -> int:
    """Check all that can be checked, then become torchrun, or return what it came to.

    Args:
        arguments: see :mod:`evenkeel.container`.
    """
    only_check = arguments[0] == "check"
    arguments = arguments[1:] if only_check else arguments
    set_environment()
    refuse_nameless(socket.gethostname())
    if arguments[:1] == ["launch"]:
        return _launch(arguments[1:], only_check)
    return _torchrun(arguments, only_check)


def _launch(arguments: list[str], only_check: bool) -> int:
    """In the words of launch/multi_node.py."""
    from . import agent
    from .launchers import MultiNode, check_train_options, link_of, parse_arguments, prepare, wait_for_master

    typed, train_args = parse_arguments(MultiNode, arguments)
    topology = typed.topology(1 if typed.gpus is None else typed.gpus)
    if only_check and topology.master_host and not resolves(topology.master_host):
        check_host(None if typed.script else check_train_options(train_args))  # node 0 may come later
        return 0
    if topology.master_host and not typed.dry_run:
        wait_for_name(topology.master_host, JOIN_SECONDS)
    start = prepare(MultiNode, arguments, TRAIN)
    check_host(start.config)
    if typed.dry_run:
        print(start.command)
    if only_check or typed.dry_run:
        return 0
    if topology.max_nodes > 1:
        hold_places(f"{topology.master_port} {topology.run_id}", link_of(start.topology).address)
    wait_for_master(start.topology)
    os.environ.update(start.command.env)
    return agent.main(list(start.command.argv[3:]))  # in this process, which has imported torch


def _torchrun(arguments: list[str], only_check: bool) -> int:
    """In torchrun's own words."""
    from . import agent
    from .launchers import check_train_options

    parsed = _parse(arguments)
    script, config = Path(parsed.training_script), None
    if not (parsed.module or parsed.no_python):
        if not script.is_file():
            raise Refusal(f"{script}: no such file in this container; mount it, or give train.py")
        if script.resolve() == TRAIN.resolve():
            config = check_train_options(parsed.training_script_args)
    check_host(config)
    if only_check:
        return 0
    if parsed.nnodes not in ("1", "1:1") and parsed.rdzv_backend == "c10d":
        hold_places(f"{parsed.rdzv_endpoint} {parsed.rdzv_id}", parsed.local_addr or socket.getfqdn())
    return agent.main(arguments)


def _parse(arguments: list[str]) -> Namespace:
    """torchrun's options as it will read them; its complaint in one line."""
    from torch.distributed.run import parse_args

    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            parsed: Namespace = cast("Any", parse_args)(arguments)
    except SystemExit as exit_:
        if not exit_.code:
            raise  # --help, which it has printed
        complaint = captured.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise Refusal(f"{complaint} (torchrun's options, then train.py and its own; --help lists both forms)") from None
    return parsed


def set_environment() -> None:
    """What torchrun and its workers need from outside, where the user has not said it.

    A user id that nobody has heard of has no home and no name, and libraries ask for both.
    """
    own = heartbeat.scratch()
    beats = heartbeat.folder()
    beats.mkdir(parents=True, exist_ok=True)
    for old in beats.glob("rank-*"):
        old.unlink(missing_ok=True)
    os.environ[heartbeat.VARIABLE] = str(beats)
    if not os.access(os.environ.get("HOME", "/"), os.W_OK):
        os.environ["HOME"] = _made(own / "home")
    if "TMPDIR" not in os.environ and not os.access("/tmp", os.W_OK):  # noqa: S108
        os.environ["TMPDIR"] = _made(own / "tmp")
    os.environ.setdefault("USER", str(os.getuid()))
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # both as the launchers do, see `launch`
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    if re.fullmatch("[0-9a-f]{12}", socket.gethostname()):
        # the container's id, which outlives its restarts: they are one launch, so --fresh starts over only once
        os.environ.setdefault("EVENKEEL_LAUNCH", f"container {socket.gethostname()}")


def _made(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def refuse_nameless(name: str) -> None:
    """Refuse a host name without an address: torchrun and gloo ask for it, and wait without a word."""
    if not resolves(name):
        raise Refusal(
            f"this container's host name {name} does not resolve, as with --network none, and torchrun would hang; "
            f"give it a network, or --add-host {name}:127.0.0.1 if all ranks are in here"
        )


def wait_for_name(master: str, patience: float) -> None:
    """Wait until node 0 has an address: engines give one to a container's name only while it runs."""
    deadline, told = time.monotonic() + patience, False
    while not resolves(master):
        if time.monotonic() > deadline:
            raise Refusal(f"--master {master}: has had no address for {patience:.0f} s; is node 0 started?")
        if not told:
            print(f"evenkeel: waiting for the name of node 0, {master}", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.5)


def resolves(name: str) -> bool:
    """Whether a host name has an address."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def check_host(config: Config | None) -> None:
    """Refuse or warn of what is wrong with this container's mounts and devices.

    Args:
        config: of the job, where it is known.
    """
    refuse_useless_gpus()
    if config:
        assert config.run_dir is not None  # resolved
        refuse_unwritable(config.run_dir)
        warn_of_small_shm(config.num_workers, shutil.disk_usage("/dev/shm").total)  # noqa: S108


def refuse_unwritable(run_dir: Path) -> None:
    """Refuse a run directory in which this user cannot write, and say whose it is."""
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if os.access(place, os.W_OK | os.X_OK):
        return
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        raise Refusal(f"--run-dir {run_dir}: {place.absolute()} is read-only; mount a folder there that is not")
    owner = place.stat()
    raise Refusal(
        f"--run-dir {run_dir}: user {os.getuid()} may not write in {place.absolute()}, which belongs to {owner.st_uid} "
        f"({stat.filemode(owner.st_mode)}); start the container with --user {owner.st_uid}:{owner.st_gid}, or give the "
        "mounted folder to this user"
    )


def warn_of_small_shm(num_workers: int, size: int) -> None:
    """Warn of a /dev/shm in which loader processes will find no room.

    Args:
        num_workers: loader processes of each rank.
        size: of /dev/shm, in bytes.
    """
    if num_workers and size < SMALL_SHM:
        print(
            f"evenkeel: --num-workers {num_workers}: loaders pass their batches through /dev/shm, which has only "
            f"{size >> 20} MB, and die of a bus error when it is full; start the container with --ipc=host or "
            "--shm-size 8g",
            file=sys.stderr,
            flush=True,
        )


def hold_places(rendezvous: str, address: str) -> None:
    """Hold this node's places in a rendezvous until this process ends, or refuse if another container has them.

    torch tells nodes apart by address and process number, and the watch for hangs by host name and process number. Two
    containers of one machine on the host's network have the same names, and process numbers so small that they are
    often the same; then each takes the other for itself. Better always no than sometimes. An abstract socket
    is seen as far as an address is: by all containers that share a network.

    Args:
        rendezvous: which one.
        address: by which torch will know this node.
    """
    for known_as in sorted({address, socket.gethostname()}):
        name = hashlib.sha256(f"{rendezvous} {known_as}".encode()).hexdigest()
        place = socket.socket(socket.AF_UNIX)
        try:
            place.bind(f"\0evenkeel/{name}")
        except OSError:
            raise Refusal(
                f"another container of this job is on this network as {known_as}; torchrun may take the two for one, "
                "and hang; start one container with all the ranks, or put both on a network of their own: "
                "docker network create NAME, then --network NAME"
            ) from None
        _held.append(place)

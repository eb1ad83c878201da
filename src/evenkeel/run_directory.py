"""The folder of one run, over all its starts: who may use it, what the run is, how it stands.

Rank 0 alone keeps it (the other ranks only write their logs), and holds a lock on it while it lives, so that two jobs
cannot train into the same folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import tomli_w

from .config import differences, flag
from .errors import Refusal
from .files import make_unused, read_json, write_atomically, write_json
from .processes import stat

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RunState = Literal["running", "finished", "stopped", "failed"]

LOCK_PATIENCE = 10.0
"""Seconds to wait for the lock: a restarted rank 0 may meet its dying predecessor."""


def launch_token() -> str:
    """What identifies the torchrun agent that started this process; it outlives the processes it restarts.

    Host, pid and start time of the parent. Empty without torchrun, where there are no restarts. A scheduler that starts
    the same job again says so in EVENKEEL_LAUNCH.
    """
    if known_as := os.environ.get("EVENKEEL_LAUNCH"):
        return known_as
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    parent = os.getppid()
    known = stat(parent)  # without /proc the pid must do
    return f"{socket.gethostname()}:{parent}:{known.started if known else '?'}"


ASIDE = r"(.*\.)?old-\d{8}-\d{6}(-\d+)?"
"""Names of folders with runs that were moved aside."""

MAX_FRUITLESS = 3
"""Attempts in a row that may die before their first step. More would be burning restarts."""


@dataclass
class RunDirectory:
    """Rank 0's handle on a run's folder. Make it with :func:`claim`."""

    path: Path
    status: dict[str, Any]
    _lock: IO[bytes]
    _over: bool = False
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def start_over(self, tokens: list[str]) -> None:
        """Move the run in the folder aside, unless a restart of this very launch finds its own.

        Args:
            tokens: the `launch_token` of every rank. torchrun's own restart count does not tell a restart: it
                stays 0 when a node joins.
        """
        if (self.path / "config.toml").exists() and not self._restarted(tokens):
            _move_aside(self.path)
            self.status = {}

    def begin(self, options: dict[str, Any], tokens: list[str], **facts: Any) -> None:
        """Record an attempt: the options as they are now, who is at work, and facts about the run."""
        self._over = False
        _write_config(self.path, options)
        launch = {token for token in tokens if token}
        if self._restarted(tokens):
            launch |= set(self.status["launch"])
        world_sizes = [*self.status.get("world_sizes", []), len(tokens)]
        last_failure, fruitless = self.status.get("last_failure"), self.fruitless
        if fruitless <= MAX_FRUITLESS:
            last_failure = self.status.get("reason") if self.status.get("state") == "failed" else None
        elif not self._restarted(tokens):
            fruitless = 0  # somebody has read why it stopped, and typed the command again
        requeues = os.environ.get("SLURM_RESTART_COUNT", "0")
        if requeues != self.status.get("requeues", "0"):
            fruitless = 0  # Slurm's deaths are not the job's; how many there may be is said by --max-requeues
        facts |= {"reason": "", "last_failure": last_failure, "fruitless": fruitless + 1, "requeues": requeues}
        self.update("running", launch=sorted(launch), world_sizes=world_sizes, **facts)

    @property
    def attempts(self) -> int:
        """Starts of this run so far."""
        return len(self.status.get("world_sizes", []))

    @property
    def fruitless(self) -> int:
        """Starts in a row, the present one included, that have not yet finished a step."""
        return int(self.status.get("fruitless", 0))

    def _restarted(self, tokens: list[str]) -> bool:
        return bool(set(filter(None, tokens)) & set(self.status.get("launch", [])))

    def update(self, state: RunState, **facts: Any) -> None:
        """Rewrite status.json with a new state and some facts; the others stay. Any thread may ask.

        After an end nothing changes: the training may still be going on while another thread ends the process.
        """
        with self._one_at_a_time:
            if self._over:
                return
            self._over = state != "running"
            if reason := facts.get("reason"):  # may name a file that is not in UTF-8
                facts["reason"] = reason.encode(errors="backslashreplace").decode()
            self.status |= {
                "state": state,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "time": time.time(),
            } | facts
            write_json(self.path / "status.json", self.status)


def check(
    path: Path,
    options: dict[str, Any],
    fresh: bool,
    harmless: frozenset[str] = frozenset(),
    samples: Mapping[str, int] | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> None:
    """Check that a run may use a folder, and create it if need be. Changes nothing in a run there.

    Args:
        path: the folder.
        options: as `config.saved_options` gives them.
        fresh: a run there will be moved aside.
        harmless: options of the task that may change.
        samples: how many there are, of the "training" data and of the "test" data.
        earlier: what options of the task were in runs that are older than the option (`Task.earlier`).

    Raises:
        Refusal: it is a file, cannot be written, is not a run's, is another run's, or the run had other data.
    """
    try:
        if path.exists() and not path.is_dir():
            raise Refusal(f"--run-dir {path}: is a file; name a folder")
        if path.is_dir() and not (path / "config.toml").exists() and _contents(path):
            raise Refusal(f"--run-dir {path}: is not empty and not a run (no config.toml); name another folder")
        if not fresh:
            _refuse_changes(path, options, harmless, samples, earlier)
            _refuse_hidden_checkpoints(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / ".lock").open("ab").close()  # says now whether files can be written here
    except OSError as error:
        raise Refusal(
            f"--run-dir {path}: cannot be written: {error.strerror or error}; mend that or name another folder"
        ) from None


def claim(
    path: Path,
    options: dict[str, Any],
    fresh: bool,
    harmless: frozenset[str] = frozenset(),
    samples: Mapping[str, int] | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """Check a folder, and lock it for rank 0 of this job. Arguments as of :func:`check`.

    Raises:
        Refusal: as :func:`check`, or it is in use.
    """
    check(path, options, fresh, harmless, samples, earlier)
    lock = _lock(path)
    if not fresh:  # again: the last holder of the lock may have started over
        _refuse_changes(path, options, harmless, samples, earlier)
    return RunDirectory(path, read_json(path / "status.json"), lock)


def adopt(path: Path, options: dict[str, Any], status: dict[str, Any], fresh: bool) -> None:
    """On a node without rank 0: keep a copy of what the run is, so that it can be continued from here alone.

    Args:
        path: the run directory on this node; on a shared file system it is rank 0's own, and nothing is done.
        options: as `config.saved_options` gives them.
        status: rank 0's.
        fresh: move an older launch's run aside.
    """
    mine = read_json(path / "status.json")
    if mine == status:
        return
    restarted = set(mine.get("launch", [])) & set(status["launch"])
    if fresh and not restarted and (path / "config.toml").exists():
        _move_aside(path)
    _write_config(path, options)
    write_json(path / "status.json", status)


def refuse_other_data(path: Path, known: Mapping[str, int], samples: Mapping[str, int]) -> None:
    """The order of an epoch is a function of the number of samples, so half an epoch of each order has some of them
    twice.

    Args:
        path: the run directory.
        known: how many samples the run has had, by part of the data; not all need be known.
        samples: how many there are now.

    Raises:
        Refusal: they are not as many.
    """
    for part, now in samples.items():
        if (before := known.get(part, now)) != now:
            raise Refusal(
                f"--run-dir {path}: the {part} data had {before} samples and has {now} now, and in another number they "
                "come in another order, some of them twice; bring back the data of the run, name another folder, or "
                "start over with --fresh"
            )


def read_config(path: Path) -> dict[str, Any]:
    """The options in a TOML file.

    Raises:
        Refusal: no such file, or not TOML.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise Refusal(f"{path}: is a pipe or a device, which may never come to its end; name a file")
        options: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of which one is TOMLDecodeError
        raise Refusal(f"{path}: not TOML: {error}") from None
    return options


def recorded_options(path: Path | None) -> dict[str, Any]:
    """What a run's folder says of options that were left open when the run began: the cut of a step ("micro_batch",
    "micro_batches") and CPU "threads". Empty where there is no run; a run of an older version may lack some."""
    if path is None:
        return {}
    try:
        status = read_json(path / "status.json")
        cut = status if status.get("micro_batch") else read_config(path / "config.toml")
    except (OSError, Refusal):
        return {}
    saved = {"threads": status.get("threads"), **{name: cut.get(name) for name in ("micro_batch", "micro_batches")}}
    return {name: value for name, value in saved.items() if value}


def _move_aside(path: Path) -> None:
    """Move a run out of its folder, into one beside it, or within it where the folder is a mount.

    What belongs to the job that starts over stays: its lock, and what Slurm needs of it.
    """
    name = f"old-{time.strftime('%Y%m%d-%H%M%S')}"
    parent, prefix = (path, "") if os.path.ismount(path) else (path.parent, f"{path.name}.")
    aside = make_unused(parent / f"{prefix}{name}")
    # the configuration last: without it, after a crash, what is left would not be known for a run
    for entry in sorted(_contents(path, all_logs=True), key=lambda entry: entry.name == "config.toml"):
        entry.rename(aside / entry.name)


def _write_config(path: Path, options: dict[str, Any]) -> None:
    write_atomically(path / "config.toml", lambda file: file.write(tomli_w.dumps(options).encode()))


def _contents(path: Path, all_logs: bool = False) -> list[Path]:
    """What is in a folder, but for what a job, a start that came to nothing, or another rank, leaves there."""
    not_the_runs = (".lock", "slurm") if all_logs else (".lock", "slurm", "logs")
    return [
        entry
        for entry in path.iterdir()
        if entry.name not in not_the_runs and entry.suffix != ".tmp" and not re.fullmatch(ASIDE, entry.name)
    ]


def _refuse_changes(
    path: Path,
    options: dict[str, Any],
    harmless: frozenset[str],
    samples: Mapping[str, int] | None,
    earlier: Mapping[str, Any] | None,
) -> None:
    """Refuse options or data that are not those of the run there."""
    _refuse_another_run(path, options, harmless, earlier or {})
    known = read_json(path / "status.json").get("samples", {})  # a run that is older than this has none
    refuse_other_data(path, known, samples or {})


def _refuse_another_run(
    path: Path, options: dict[str, Any], harmless: frozenset[str], earlier: Mapping[str, Any]
) -> None:
    if not (path / "config.toml").exists():
        return
    changed = differences({**earlier, **read_config(path / "config.toml")}, {**earlier, **options}, harmless)
    if changed:
        shown = ", ".join(
            f"{flag(name)} was {'unset' if old is None else old} and is now {'unset' if new is None else new}"
            for name, old, new in changed
        )
        raise Refusal(
            f"--run-dir {path}: holds another run: {shown}; continue it with the old values, name another folder, "
            "or start over with --fresh"
        )


def _refuse_hidden_checkpoints(path: Path) -> None:
    """Checkpoints in a folder that may not be read or entered would count as none, and the run would start over."""
    folder = path / "checkpoints"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.scandir(folder).close()
            (folder / "any").stat()
    except PermissionError as error:
        raise Refusal(
            f"--run-dir {path}: its checkpoints cannot be read: {error.strerror}; mend that or name another folder"
        ) from None


def _lock(path: Path) -> IO[bytes]:
    """Hold a lock on the folder until this process ends, however it ends."""
    name = path / ".lock"
    file = name.open("ab")
    patience = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < patience:
                time.sleep(0.1)
                continue
            holder = read_json(path / "status.json")
            who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
            raise Refusal(f"--run-dir {path}: is in use by {who}; stop that job or name another folder") from None
        return file

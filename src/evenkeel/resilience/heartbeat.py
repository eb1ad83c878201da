"""Whether the ranks of a container are alive: each writes a file once a second, and the health check reads them.

    python -m evenkeel.resilience.heartbeat        exit code 0: healthy, 1: not; one line says why

The container engine runs it every few seconds, so nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ..common.phases import activity
from ..common.processes import stat

VARIABLE = "EVENKEEL_HEARTBEATS"
"""The environment variable with the folder. Ranks write no files where it is not set."""

FROZEN_AFTER = 15.0
"""Seconds without a pulse after which a rank counts as frozen. A container engine also retries several times."""

LATE_AFTER = 900.0
"""Seconds that a job may be without a training rank: nodes wait ten minutes for each other, and then load."""

STATES = {"T": "it has been stopped (SIGSTOP)", "D": "it waits for a disk or a file system", "t": "in a debugger"}


class Pulse(NamedTuple):
    """What a rank last wrote about itself. Times are the machine's monotonic clock, in seconds."""

    rank: int
    pid: int
    started: int | None  # when its process was, in clock ticks; another process may have the same pid by now
    time: float
    progress: float  # when its phase last changed
    patience: float  # its --hang-timeout; 0: none
    place: str  # its phase and step


def folder() -> Path:
    """Where the ranks of this container write."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else scratch() / "heartbeats"


def scratch() -> Path:
    """This container's own folder, which both the main process and the health check find. May not exist.

    In /tmp, or in /dev/shm where the root file system is read-only. The latter may be the whole machine's (--ipc=host),
    hence the number of the mount namespace, which all processes of a container share.
    """
    parent = next((path for path in ("/tmp", "/dev/shm") if os.access(path, os.W_OK)), "/tmp")  # noqa: S108
    return Path(parent) / f"evenkeel-{os.getuid()}-{Path('/proc/self/ns/mnt').stat().st_ino}"


def start(rank: int, stopped: threading.Event, patience: float) -> None:
    """Write this rank's pulse until `stopped`; only if :data:`VARIABLE` is set. `patience`: --hang-timeout."""
    if named := os.environ.get(VARIABLE):
        path = Path(named) / f"rank-{rank}.json"
        threading.Thread(target=_beat, args=(path, rank, stopped, patience), name="heartbeat", daemon=True).start()


def _beat(path: Path, rank: int, stopped: threading.Event, patience: float) -> None:
    me, seen, progress, new = stat(os.getpid()), -1, 0.0, path.with_suffix(".tmp")
    while True:
        now, place = time.monotonic(), f"{activity.phase} of step {activity.step + 1}"
        if activity.marks != seen or activity.is_patient():
            seen, progress = activity.marks, now
        pulse = Pulse(rank, os.getpid(), me and me.started, now, progress, patience, place)
        with contextlib.suppress(OSError):  # the disk is full, or the folder is gone with its container
            new.write_text(json.dumps(pulse))
            new.replace(path)
        if stopped.wait(1.0):
            break
    with contextlib.suppress(OSError):
        path.unlink()


def renew(seconds: float = 0.0) -> None:
    """Let the health check wait for ranks from now on, and so many seconds longer; only if :data:`VARIABLE` is set."""
    if named := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            os.utime(named, (time.time() + seconds,) * 2)


def check(beats: Path) -> tuple[bool, str]:
    """Whether the ranks that write to a folder are healthy, and a line about them."""
    try:
        quiet = time.time() - beats.stat().st_mtime  # every pulse renews it
        living = [pulse for path in sorted(beats.glob("rank-*.json")) if (pulse := _read(path))]
    except OSError as error:
        remedy = "is `python -m evenkeel.launch.docker.container` running?"
        return False, f"no heartbeats in {beats}: {error.strerror}; {remedy}"
    if ill := [line for pulse in living if (line := _complaint(pulse))]:
        return False, "; ".join(ill)
    if living:
        return True, f"{len(living)} rank{'s' * (len(living) > 1)}, rank {living[0].rank} in {living[0].place}"
    if quiet > LATE_AFTER:
        return False, f"no rank has been training for {quiet:.0f} s"
    return True, f"starting: no rank has been training for {max(quiet, 0):.0f} s"


def _complaint(pulse: Pulse) -> str:
    silent, idle = (time.monotonic() - moment for moment in (pulse.time, pulse.progress))
    if silent > FROZEN_AFTER:
        process = stat(pulse.pid)
        why = STATES.get(process.state if process else "", "it does not run")
        return (
            f"rank {pulse.rank} is frozen: no heartbeat for {silent:.0f} s, last seen in {pulse.place}; "
            f"process {pulse.pid}: {why}"
        )
    if 0 < pulse.patience < idle:
        return f"rank {pulse.rank} has made no progress for {idle:.0f} s, in {pulse.place}"
    return ""


def _read(path: Path) -> Pulse | None:
    """The pulse in a file; None if its process has ended, which the agent handles."""
    try:
        pulse = Pulse(*json.loads(path.read_text()))
    except FileNotFoundError:
        return None  # ended just now
    found = stat(pulse.pid)
    return pulse if found and found.started == pulse.started and found.state != "Z" else None


if __name__ == "__main__":
    healthy, text = check(folder())
    print(f"evenkeel: {text}")
    sys.exit(not healthy)

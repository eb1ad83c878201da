"""Whether the ranks of a container live: each says so once a second in a file, and the health check reads them.

    python -m evenkeel.heartbeat        exit code 0: healthy, 1: not; one line says why

For the health check of a container, which asks every few seconds: nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .activity import activity
from .processes import stat

VARIABLE = "EVENKEEL_HEARTBEATS"
"""Names the folder. Where it is not set, ranks leave no files."""

INTERVAL = 1.0
"""Seconds between two beats of a rank."""

FROZEN_AFTER = 15.0
"""Seconds without a beat after which a rank counts as frozen. A container engine asks several times on top."""

LATE_AFTER = 900.0
"""Seconds in which a job may have no rank that trains: nodes wait ten minutes for each other, and then load."""

STATES = {"T": "it has been stopped (SIGSTOP)", "D": "it waits for a disk or a file system", "t": "in a debugger"}
"""States of a process that explain why it does not beat."""


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself. Times are those of the machine's monotonic clock."""

    rank: int
    pid: int
    started: int
    """When its process was started, in ticks: with the pid it names it once and for all."""
    time: float
    progress: float
    """When it last got anywhere."""
    patience: float
    """Its --hang-timeout; 0: none."""
    phase: str
    step: int

    @property
    def place(self) -> str:
        """Where the rank was."""
        return f"{self.phase} of step {self.step + 1}"


def folder() -> Path:
    """Where the ranks of this container beat."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else scratch() / "heartbeats"


def scratch() -> Path:
    """A folder of this container's own, found alike by its main process and by its health check. May not exist.

    In /tmp, or where the root file system is read-only in /dev/shm. That may be the whole machine's (--ipc=host), hence
    the number of the mount namespace, which all processes of a container have in common.
    """
    parent = next((path for path in ("/tmp", "/dev/shm") if os.access(path, os.W_OK)), "/tmp")  # noqa: S108
    return Path(parent) / f"evenkeel-{os.getuid()}-{Path('/proc/self/ns/mnt').stat().st_ino}"


def start(rank: int, stopped: threading.Event, patience: float) -> None:
    """Beat for this rank, in a thread, until `stopped` is set; if anybody wants to know.

    Args:
        rank: over all nodes.
        stopped: ends the beat and removes its file.
        patience: the job's --hang-timeout in seconds.
    """
    if named := os.environ.get(VARIABLE):
        path = Path(named) / f"rank-{rank}.json"
        threading.Thread(target=_beat, args=(path, rank, stopped, patience), name="heartbeat", daemon=True).start()


def _beat(path: Path, rank: int, stopped: threading.Event, patience: float) -> None:
    me, changes, progress = stat(os.getpid()), -1, 0.0
    new = path.with_suffix(".tmp")
    while True:
        now = time.monotonic()
        if activity.changes != changes:
            changes, progress = activity.changes, now
        started = me.started if me else 0
        beat = Beat(rank, os.getpid(), started, now, progress, patience, activity.phase, activity.step)
        with contextlib.suppress(OSError):  # full, or gone with its container
            new.write_text(json.dumps(asdict(beat)))
            new.replace(path)
        if stopped.wait(INTERVAL):
            break
    with contextlib.suppress(OSError):
        path.unlink()


def check(beats: Path) -> tuple[bool, str]:
    """Whether all is well with the ranks that beat in a folder, and a line about it."""
    try:
        quiet = time.time() - beats.stat().st_mtime  # every beat renews it
        living = [beat for path in sorted(beats.glob("rank-*.json")) if (beat := _read(path))]
    except OSError as error:
        return False, f"no heartbeats in {beats}: {error.strerror}; is `python -m evenkeel.container` running?"
    if not living:
        if quiet > LATE_AFTER:
            return False, f"no rank has been training for {quiet:.0f} s"
        return True, f"starting: no rank is training, for {max(quiet, 0):.0f} s now"
    now = time.monotonic()
    ill = [line for beat in living if (line := _complaint(beat, now))]
    if ill:
        return False, "; ".join(ill)
    last = living[0]
    return True, f"{len(living)} rank{'s' * (len(living) > 1)}, rank {last.rank} in {last.place}"


def _complaint(beat: Beat, now: float) -> str:
    if now - beat.time > FROZEN_AFTER:
        process = stat(beat.pid)
        why = STATES.get(process.state if process else "", "it does not run")
        return (
            f"rank {beat.rank} is frozen: nothing heard for {now - beat.time:.0f} s, last seen in {beat.place}; "
            f"process {beat.pid}: {why}"
        )
    if beat.patience and now - beat.progress > beat.patience:
        return f"rank {beat.rank} has made no progress for {now - beat.progress:.0f} s, in {beat.place}"
    return ""


def _read(path: Path) -> Beat | None:
    """The beat in a file; None if its process has ended, which is the agent's business and no illness."""
    try:
        beat = Beat(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None  # ended just now
    found = stat(beat.pid)
    return beat if found and found.started == beat.started and found.state != "Z" else None


def main() -> int:
    """Say how it stands with the ranks here."""
    healthy, text = check(folder())
    print(f"evenkeel: {text}")
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())

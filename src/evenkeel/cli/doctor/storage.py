"""The run directory: free space, writing, renaming, locking, speed, and whether all nodes share it."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from ...common.files import sync_folder, try_lock
from ...distributed.world import World
from .findings import Finding, judged

MIB = 1 << 20
SAMPLE = 32 * MIB
"""Bytes that are written to measure the speed."""
LEAST, ENOUGH = 256 * MIB, 5 << 30
SLOW = 20.0
"""MB/s; below that a checkpoint of 100 million parameters with its optimizer takes over a minute."""


def place_of(run_dir: Path) -> Path:
    """The existing folder in which the run directory is or would be made, because a test makes no folders."""
    path = run_dir.absolute()
    return next(it for it in (path, *path.parents) if it.exists())


def run_directory(run_dir: Path) -> Iterator[Finding]:
    """Space, then writing, renaming and locking; leaves nothing behind."""
    name, place = "run directory", place_of(run_dir)
    other, quoted = "--run-dir /another/folder", shlex.quote(str(place))
    if not place.is_dir():
        yield Finding("FAIL", name, f"{place}: not a folder", "a folder", other)
        return
    free = shutil.disk_usage(place).free
    yield judged(
        "space",
        f"{free / MIB:.0f} MB free at {place}",
        f"{LEAST // MIB} MB at least, better {ENOUGH // MIB}: a new checkpoint is written before an old one is deleted",
        f"du -xh {quoted} | sort -h | tail    # delete something, or: {other}",
        warn=free < ENOUGH,
        fail=free < LEAST,
    )
    try:
        speed = _write(place, min(SAMPLE, max(MIB, free // 2)))
    except OSError as error:
        mount = next(it for it in (place, *place.parents) if it.is_mount())
        remedies = {
            errno.EROFS: f"mount -o remount,rw {shlex.quote(str(mount))}    # or: {other}",
            errno.EACCES: f"sudo chown {os.getuid()} {quoted}    # or: {other}",
        }
        remedy = remedies.get(error.errno or 0, other)
        yield Finding("FAIL", name, f"{place}: {error.strerror or error}", "write, fsync, rename and lock work", remedy)
        return
    measured = f"{place}: write, fsync, rename and lock work, {speed:.0f} MB/s"
    yield judged(name, measured, f"{SLOW:g} MB/s or more", other, warn=speed < SLOW)


def _write(place: Path, size: int) -> float:
    """Write like a checkpoint; returns MB/s. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
        path, chunk = Path(folder, "part"), os.urandom(MIB)
        start = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size // MIB):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        spent = time.perf_counter() - start
        whole = Path(folder, "whole")
        whole.write_bytes(b"old")
        path.replace(whole)
        sync_folder(Path(folder))
        if whole.stat().st_size != size:
            raise OSError(errno.EIO, "a file changed its size when it was renamed")
        with whole.open("rb") as first, whole.open("rb") as second:
            if not try_lock(first) or try_lock(second):
                raise OSError(errno.ENOLCK, "locks do not work")
    return size / MIB / spent


def shared(world: World, run_dir: Path, needed: bool = False) -> list[Finding]:
    """Whether all ranks see what rank 0 writes in the run directory, as with --shard on they must. Collective."""
    mark: Path | None = place_of(run_dir) / f".doctor-{uuid.uuid4().hex}" if world.rank == 0 else None
    try:
        if mark:
            mark.touch()
    except OSError:  # `run_directory` says why
        mark = None
    try:
        path = world.broadcast(mark)
        seen = world.all_gather((socket.gethostname(), path is not None and path.is_file()))
    finally:
        if mark:
            mark.unlink(missing_ok=True)
    if not mark:
        return []
    blind = ", ".join(sorted({host for host, sees in seen if not sees}))
    value = f"{blind}: files of rank 0 in {mark.parent} are not visible there" if blind else "seen by all ranks"
    expected = "a shared file system; without it only rank 0's node has the run, and must be in the next start"
    if needed:
        expected = "a shared file system: with --shard on each rank writes its part of a checkpoint"
    look = f"--run-dir /a/shared/folder    # look at: findmnt --target {shlex.quote(str(mark.parent))}"
    return [judged("shared folder", value, expected, look, warn=blind and not needed, fail=blind and needed)]

"""Files that are whole or absent, locks that end with their process, and files that are read while they grow."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

log = logging.getLogger(__name__)

MOST = 1e11
"""The largest number that a run writes: a time in the year 5138, a duration of 3,000 years."""

LOCK = ".lock"
"""The file by which a folder is locked."""

TOUCH, FROZEN = 0.5, 2.0
"""Seconds between two touches of that file by the process that has locked it; without one it counts as frozen."""

SAY_AFTER, SAY_AGAIN = 15.0, 60.0
"""Seconds before a process says that it waits for that lock, and between two such lines."""


def temporary_name(path: Path) -> Path:
    """A new name beside a file or folder, to write it there; not by a process's number, which containers share."""
    return path.with_name(f".{path.name}.{uuid4().hex}.tmp")


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], private: bool = False) -> None:
    """Write a file so that a crash leaves the old file or the new one, never a partial one.

    `write` is called with the open, empty file; `private`: see :func:`close_to_others`. The steps and their order are
    those of "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014).
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            if private:
                close_to_others(temporary)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file, all of it or nothing. Raises OSError, also if the disk is full."""
    with path.open("a+b", buffering=0) as file:
        if (end := file.tell()) and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line  # after one that a power failure has cut
        if file.write(line) < len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's part of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to the disk; without that a rename is not durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, if they are not there; a power cut afterwards does not undo that."""
    if not path.is_dir():
        if not path.parent.exists():
            make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def close_to_others(path: Path) -> None:
    """Make a file readable for its owner only, and for the group if the umask (002) lets the group write."""
    path.chmod(0o660 if path.stat().st_mode & 0o020 else 0o600)


def write_json(path: Path, value: Any, private: bool = False, indent: int | None = 2) -> None:
    """Write JSON; see :func:`write_atomically`."""
    text = json.dumps(value, indent=indent) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), private)


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append a line of JSON, as `append_line` does."""
    append_line(path, f"{json.dumps(record)}\n".encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file, nor its folder. ValueError: it is not JSON, or not an object."""
    try:
        value: Any = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except RecursionError as error:
        raise ValueError(f"JSON nested too deeply: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} and not an object")
    return value


def alike(value: Any, example: Any) -> bool:
    """Whether a value from JSON has the type of an example, and so have all values in it.

    The first item of a list or object is the example for all its items. A list of two matches only a list of two; an
    object with several names matches only one with these names. Numbers are at most `MOST`, integers fit into 64 bits;
    negative ones match only a negative example.
    """
    if isinstance(example, float):
        return type(value) in (int, float) and MOST * min(0, example) <= value <= MOST
    if type(value) is not type(example):
        return False
    if type(example) is int:
        return bool(min(0, example) * 2**63 <= value < 2**63)
    if isinstance(example, dict) and len(example) > 1:
        return value.keys() == example.keys() and all(alike(value[name], example[name]) for name in example)
    if isinstance(example, dict):
        return all(alike(item, *example.values()) for item in value.values())
    if isinstance(example, list):
        return len(example) in (1, len(value)) and all(alike(item, example[0]) for item in value)
    return True


def sha256_of(path: Path, advance: Callable[[int], object] = lambda _: None) -> str:
    """The SHA-256 of a file, in hexadecimal digits. ``advance`` gets the bytes of each block that is read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def unused(path: Path) -> Path:
    """The path itself, or with -2, -3, ... appended: the first that does not exist."""
    names = (path.name if n == 1 else f"{path.name}-{n}" for n in count(1))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def make_unused(path: Path) -> Path:
    """Make a folder with such a name; two processes that do so at once get different ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with contextlib.suppress(FileExistsError):
            (free := unused(path)).mkdir()
            return free


def try_lock(file: IO[Any] | int, until: float = 0.0, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or folder against other processes; return whether that succeeded.

    Tries until a time of `time.monotonic`; 0: once. `LOCK_SH`: others may do the same. The kernel releases the lock
    when the file is closed, or when the process dies. Raises OSError if the file system has no locks.
    """
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOLCK):  # Lustre without its option, some of FUSE
                raise OSError(error.errno, "its file system has no locks (flock): mount it with flock") from None
            raise
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)


def unlock(file: IO[Any] | int) -> None:
    """Release a lock. Closing the file is not enough: a loader process that was forked meanwhile has it open too."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def folder_locked(folder: Path, until: float = 0.0, kind: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Lock a folder to the end of the block, by the file `LOCK` in it, as :func:`try_lock`; yields whether it is.

    The holder touches that file. Who sees that before ``until`` waits beyond it, and says so: two who write to a
    slow disk at once take twice as long.
    """
    descriptor, released, say_at = _open_lock(folder), threading.Event(), time.monotonic() + SAY_AFTER
    try:
        before, seen, locked = _touched(folder, descriptor), -math.inf, try_lock(descriptor, kind=kind)
        while not locked and (time.monotonic() < until or time.monotonic() - seen < FROZEN):
            locked = try_lock(descriptor, time.monotonic() + 0.1, kind)
            if (now := _touched(folder, descriptor)) != before:
                before, seen = now, time.monotonic()
            if not locked and time.monotonic() > say_at:
                log.warning("waiting for the lock of %s, which %s has", folder / LOCK, _holder(descriptor))
                say_at += SAY_AGAIN
        if locked:
            own = os.dup(descriptor)
            try:
                threading.Thread(target=_touch, args=(own, released), name="touch", daemon=True).start()
            except RuntimeError:  # no thread can be started: then others wait less
                os.close(own)
        yield locked
    finally:
        released.set()
        unlock(descriptor)
        os.close(descriptor)


def _open_lock(folder: Path) -> int:
    """Open what a process locks to lock a folder: on NFS other hosts learn of the lock of a file, if it was opened to
    read and write, and not of a folder's."""
    try:
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # this process may only read there, or the disk is full: a lock among those of this host
        return os.open(folder, os.O_RDONLY)


def _holder(descriptor: int) -> str:
    """Who has locked an open file, in words. The kernel lists the processes of this machine only."""
    with contextlib.suppress(OSError):
        place = f"[0-9a-f]+:[0-9a-f]+:{os.fstat(descriptor).st_ino}"
        if pids := re.findall(rf"FLOCK .* ([1-9]\d*) {place} ", Path("/proc/locks").read_text()):
            return f"process {', '.join(pids)} of this machine"
    return "a process of another machine or container"


def _touch(descriptor: int, released: threading.Event) -> None:
    """In a thread of the holder: touch what is locked until it is released, by a descriptor of this thread's own."""
    while not released.wait(TOUCH):
        with contextlib.suppress(OSError):
            os.utime(descriptor)
    os.close(descriptor)


def _touched(folder: Path, descriptor: int) -> int:
    """When the holder of a folder's lock has touched what is locked."""
    with contextlib.suppress(OSError):  # the folder has another name by now
        os.close(os.open(folder / LOCK, os.O_RDONLY))  # NFS asks its server then, and has an old time without that
    return os.fstat(descriptor).st_mtime_ns


class HashingWriter:
    """A file that computes its size and sha256 while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        """Write, and store the error if that fails, because the caller may report another one instead."""
        self.digest.update(data)
        self.bytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

"""Files that are either whole or absent, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], private: bool = False) -> None:
    """Write a file under a temporary name, bring it to the disk, and only then give it its name.

    A crash leaves the old file or the new one, never a part. The steps and their order are those of
    "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014).

    Args:
        path: of the file.
        write: gets it, open and empty.
        private: nobody else may read it, but for a group whose members may write to each other's files (umask 002).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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


def close_to_others(path: Path) -> None:
    """Take a file's permissions from everybody but its owner, and a group to whom the umask lets it be written."""
    path.chmod(0o660 if path.stat().st_mode & 0o020 else 0o600)


def write_json(path: Path, value: Any, private: bool = False) -> None:
    """Write JSON for people and programs, atomically. Arguments as of :func:`write_atomically`."""
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), private)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file.

    Raises:
        ValueError: it is no JSON, or no object.
        OSError: it may not be read.
    """
    try:
        value: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError(f"JSON in too many layers: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} and not an object")
    return value


def unused(path: Path) -> Path:
    """The path itself, or with -2, -3 ... at its end: the first that does not exist."""
    names = (path.name if n == 1 else f"{path.name}-{n}" for n in count(1))
    return next(free for name in names if not (free := path.with_name(name)).exists())


def make_unused(path: Path) -> Path:
    """Make a folder of such a name; of two processes that ask at once, each gets its own."""
    while True:
        with contextlib.suppress(FileExistsError):
            (free := unused(path)).mkdir(parents=True)
            return free


def sync_folder(folder: Path) -> None:
    """Bring a folder's own entries to the disk: a rename is not durable before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Writing a checkpoint of a sharded run: each rank its rows, without a message to any other.

    checkpoints/.step-00000042.TOKEN.tmp/state-1-of-3.pt        rank 1's rows (state_files.py)
                                         state-1-of-3.pt.json   its size and sha256, written after it
                                         .lock                  locked by those that write

All ranks of a launch write into one hidden folder, so it must be on a disk that they share. The rank that finds all
pieces writes the manifest and renames the folder. So a folder called step-* is complete, as of any run; a rank that is
killed leaves a hidden one, which the next start deletes. Writers lock it shared, so that a start first waits for them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..common.deadlines import FOREVER
from ..common.files import folder_locked, read_json, try_lock, unlock, write_json
from ..common.naming import Kind
from ..resilience.slot_files import step_in
from ..training import slots
from .checkpoint import LEFT_BEHIND, WRITER_TIMEOUT, Checkpoints, check_not_stale, checkpoints_of
from .manifest import MANIFEST, step_of
from .state_files import WrittenFile, clean, clean_locked, dump, file_of, final_of, folder_of, hidden, state_files

ROWS_TIMEOUT = 600.0
"""Seconds that rank 0 waits for the rows of the others, after its own are written."""


def write_rows(
    checkpoints: Checkpoints,
    captured: Mapping[str, Any],
    metrics: Mapping[str, float],
    kind: Kind,
    token: str,
    until: float = FOREVER,
) -> None:
    """Write this rank's rows, and give the checkpoint its name if all others are there.

    Args:
        checkpoints: of the run.
        captured: the result of `State.capture` in a sharded run.
        metrics: the evaluation at this step, the same on all ranks.
        kind: a snapshot that exists already is not written again.
        token: the same on all ranks of a launch.
        until: the moment until which to wait for a rank that deletes old checkpoints.

    Raises:
        OSError: the disk is full or gone, or another run has begun there; older checkpoints are untouched.
    """
    step, rows = captured["step"], captured["rows"]
    final = checkpoints.folder / folder_of(step)
    if kind == "snapshot" and (final / MANIFEST).exists():
        return
    check_not_stale(checkpoints)
    folder = checkpoints.folder / f".{final.name}.{token}.tmp"
    if kind == "checkpoint" and rows["rank"] == 0:
        with checkpoints.writer_locked(time.monotonic() + WRITER_TIMEOUT) as alone:
            if alone:  # of a checkpoint for which a rank had no space, the others have left their rows
                clean_locked(checkpoints.folder, LEFT_BEHIND)
    folder.mkdir(parents=True, exist_ok=True)
    name = file_of(rows["rank"], rows["ranks"])
    try:
        with folder_locked(folder, FOREVER, fcntl.LOCK_SH):
            _write_once(folder / name, captured, {"kind": kind, "metrics": dict(metrics)}, until)
        publish_if_whole(checkpoints, folder, until)
    except FileNotFoundError:
        if checkpoints.newest_step() < step:  # else another process with these rows was faster
            raise


def _write_once(path: Path, captured: Mapping[str, Any], info: dict[str, Any], until: float) -> None:
    """Write rows, unless they are written: this rank's keeper and other replicas (--shard N) have the same ones."""
    piece = path.with_name(f"{path.name}.json")
    with path.open("ab") as file:

        def unwritten() -> bool:
            # a folder that has got its name meanwhile has this file elsewhere, and whole
            return not piece.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())

        if not try_lock(file, until):
            return  # another process is writing the same rows, and publishes them
        try:
            if unwritten():
                file.truncate(0)  # of a process that was killed
                with os.fdopen(os.dup(file.fileno()), "ab") as rows:  # what it has not written goes with it
                    written = dump(dict(captured), rows)
                    os.fsync(rows.fileno())
                write_json(piece, asdict(written) | info)
        except OSError:
            if unwritten():
                file.truncate(0)  # frees the disk, and tells rank 0
            raise
        finally:
            unlock(file)


def publish_if_whole(checkpoints: Checkpoints, folder: Path, until: float = FOREVER) -> None:
    """Give a hidden folder its name if all ranks have written their rows."""
    final = final_of(folder)
    step = step_of(final)
    try:
        pieces = [folder / f"{name}.json" for name in state_files(file.name for file in folder.iterdir())]
        infos = [read_json(piece) for piece in pieces]
    except LookupError:
        return
    if not all(infos):
        return
    # a rank that is stopped while the others write a planned checkpoint writes a snapshot of the same step
    kind: Kind = "checkpoint" if all(info["kind"] == "checkpoint" for info in infos) else "snapshot"
    metrics = infos[0]["metrics"] if kind == "checkpoint" else {}
    files = {piece.stem: WrittenFile(info["bytes"], info["sha256"]) for piece, info in zip(pieces, infos, strict=True)}
    with checkpoints.writer_locked(until):
        # look again: another rank may have published it, and one more begun to write a new folder
        if folder.exists() and all(read_json(piece) == info for piece, info in zip(pieces, infos, strict=True)):
            write_json(folder / MANIFEST, asdict(replace(checkpoints.manifest(step, metrics, kind), files=files)))
            checkpoints.publish(folder, final, kind)
            for piece in pieces:
                (final / piece.name).unlink(missing_ok=True)


def await_whole(checkpoints: Checkpoints, step: int, seconds: float) -> None:
    """Wait until a checkpoint of this step has its name. The last writer may be unable to give it that: it was killed
    just then, or a network file system showed it an old list of files. So this process looks each second.

    Raises:
        OSError: not all ranks have written their rows by then, or one has failed to.
    """
    final, until = checkpoints.folder / folder_of(step), time.monotonic() + seconds
    given_up: set[Path] = set()
    look = time.monotonic() + 1
    while not (final / MANIFEST).exists() and checkpoints.newest_step() < step:
        if time.monotonic() > until:
            raise OSError(errno.ETIMEDOUT, "not all ranks have written their rows", str(checkpoints.folder))
        time.sleep(0.01)
        if time.monotonic() > look:
            for folder in checkpoints.folder.glob(f".{final.name}.*.tmp"):
                with contextlib.suppress(FileNotFoundError):  # it has its name now
                    publish_if_whole(checkpoints, folder, until)
            before, given_up = given_up, set(filter(_is_given_up, checkpoints.folder.glob(f".{final.name}.*.tmp/*.pt")))
            if failed := sorted(before & given_up):  # twice: a rank may be about to write
                raise OSError(errno.EIO, "a rank could not write its rows", str(failed[0]))
            look = time.monotonic() + 1


def _is_given_up(file: Path) -> bool:
    """Whether no process writes a file of rows that is empty: one has failed to (`_write_once`), or was killed."""
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as opened:
        if not os.fstat(opened.fileno()).st_size and try_lock(opened):
            unlock(opened)
            return True
    return False


def await_writers(checkpoints: Checkpoints) -> None:
    """At a start: wait for processes of earlier attempts that still write, complete what they can no longer, and
    delete what is left."""
    until = time.monotonic() + WRITER_TIMEOUT
    for folder in sorted(hidden(checkpoints.folder)):
        try:
            with folder_locked(folder, until):
                publish_if_whole(checkpoints, folder, until)
        except OSError:
            if folder.exists():  # else it is complete and has another name now, or another host has deleted it
                raise
    clean(checkpoints.folder)


def write_slots(descriptors: list[int], until: float) -> None:
    """Write what is in a rank's slots, the older step first: all ranks have that one, if not the newer. Then its copy
    of another rank's (--replicate), if that rank has not written them.

    Called by the rank, whose own slots change no more, or if it is dead in a child of its keeper.
    """
    own, copies = descriptors[:2], descriptors[2:]
    _write_steps(own, _steps_in(own), until)
    steps = _steps_in(copies)
    # a copy of the newest step may be on its way, over the older one
    _write_steps(copies, steps if steps[-1:] == _steps_in(own)[-1:] else steps[-1:], until)


def _steps_in(descriptors: list[int]) -> list[int]:
    return sorted({step_in(each) for each in descriptors} - {0})


def _write_steps(descriptors: list[int], steps: list[int], until: float) -> None:
    for step in steps:
        captured, label = slots.read(next(each for each in descriptors if step_in(each) == step))
        checkpoints = checkpoints_of(label)
        if step > checkpoints.newest_step():
            write_rows(checkpoints, captured, {}, "snapshot", label["token"], until)

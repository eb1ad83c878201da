"""The files in a checkpoint that hold its state: one with all of it, or one for each rank with its rows. The names of
checkpoints' folders, and what a kill leaves of them.

    state.pt          the state of a run whose ranks all have the whole of it
    state-1-of-3.pt   of a sharded run: rank 1's rows of each tensor that is divided among three ranks, and all the rest

A file of rows has an entry "rows": {"rank": 1, "ranks": 3, "of": {"model.head.weight": 65, ...}}, the number of rows
of each divided tensor, by the name that `training.staging.named_tensors` gives it. The rows of a rank are those of
`torch.chunk`: all ranks but the last ones have equally many, and the last ones may have none.

torch is imported where it is used: listing checkpoints takes a tenth of a second, importing torch two.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from ..common.files import HashingWriter, folder_locked, temporary_name, try_lock

log = logging.getLogger(__name__)

T = TypeVar("T")

STATE = "state.pt"

DAMAGED, WRONG = "damaged-", "wrong-"
"""The names of checkpoints that were set aside begin with one: damaged, or of a state that --verify-every doubts."""


READ_AGAIN = 0.5, 1.0, 2.0
"""Seconds before each further attempt to read a file: a disk in a network may fail for a moment (EIO, ESTALE)."""

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
LASTING = (*MISSING, PermissionError)
"""Errors of reading that no further attempt mends."""

OWN = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of reading that are this process's: out of memory, too many open files."""


class Damaged(Exception):  # noqa: N818
    """A checkpoint that differs from what was written; the message names the file and what is wrong."""


class Unreadable(Damaged):
    """One that the disk did not deliver; perhaps only for a moment."""


@dataclass(frozen=True)
class WrittenFile:
    """Size and sha256 of a checkpoint's file when it was written."""

    bytes: int
    sha256: str


def folder_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}"


def final_of(path: Path) -> Path:
    """The path of a checkpoint, from that of a hidden folder for it, or from its own."""
    return path.with_name(path.name.removeprefix(".").partition(".")[0])


def file_of(rank: int, ranks: int) -> str:
    """The name of the file with a rank's rows."""
    return f"state-{rank}-of-{ranks}.pt"


def patiently(read: Callable[[Path], T], file: Path, pauses: Sequence[float] = READ_AGAIN) -> T:
    """What `read` returns of a checkpoint's file, with a further attempt after each of the pauses if the disk fails.

    Raises:
        Damaged: it is missing; or fails for longer, as a bad sector does (`Unreadable`): then an older checkpoint is
            worth more than a run that has ended, and nothing is deleted.
    """
    for seconds in (*pauses, None):
        try:
            return read(file)
        except OSError as error:
            if error.errno in OWN:
                raise
            trouble = f"{file}: cannot be read: {error.strerror or error}"
            if seconds is None or isinstance(error, LASTING):
                raise (Damaged if isinstance(error, MISSING) else Unreadable)(trouble) from None
            log.warning("%s; trying again in %s s", trouble, seconds)
            time.sleep(seconds)
    raise AssertionError


def state_files(names: Iterable[str]) -> list[str]:
    """The names that hold the state, in the order of ranks, of all files of a checkpoint.

    Raises:
        LookupError: one is missing.
    """
    there = set(names)
    ranks = max((int(it[1]) for name in there if (it := re.fullmatch(r"state-\d+-of-(\d+)\.pt", name))), default=0)
    expected = [STATE] if STATE in there or not ranks else [file_of(rank, ranks) for rank in range(ranks)]
    if missing := [name for name in expected if name not in there]:
        raise LookupError(f"{missing[0]} is missing")
    return expected


Want = Literal["all", "weights", "shapes"]
"""What a reader needs of a state: all tensors in memory; those of the model and its average, which may be in files
without names (`training.file_memory`); or none of the values, only that there is no damage."""


def read_state(path: Path, step: int, want: Want) -> dict[str, Any]:
    """Read the state of a checkpoint's folder; of a sharded run: all its rows, joined. See `manifest.load`."""
    parts = read_parts(path, step, in_place=want == "shapes")
    return parts[0] if "rows" not in parts[0] else _joined(parts, want, path.parent)


def _joined(parts: Sequence[dict[str, Any]], want: Want, folder: Path) -> dict[str, Any]:
    """The whole state of a sharded run, one tensor after the other in memory of its own."""
    import torch

    from ..training.file_memory import on_disk

    def memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if want == "weights":
            return on_disk(shape, dtype, folder)
        return torch.empty(tuple(shape), dtype=dtype, device="cpu" if want == "all" else "meta")

    if want == "weights":
        parts = [{name: value for name, value in part.items() if name != "optimizers"} for part in parts]
    return rows_of(parts, 0, 1, memory)


def read_parts(path: Path, step: int, in_place: bool) -> list[dict[str, Any]]:
    """Read each file of a checkpoint that holds its state, in the order of ranks. Tensors of a sharded run, or with
    ``in_place`` of any, stay in the files until they are used.

    Raises:
        Damaged: one is missing, does not load without running code, or is not of this step.
    """
    try:
        names = state_files(file.name for file in path.iterdir()) if path.is_dir() else [STATE]
    except LookupError as error:
        raise Damaged(f"{path}: {error.args[0]}") from None
    parts = [_read(path / name, step, in_place or name != STATE) for name in names]
    for rank, (name, part) in enumerate(zip(names, parts, strict=True)):
        rows = part.get("rows")
        if name != STATE and not (isinstance(rows, dict) and (rows["rank"], rows["ranks"]) == (rank, len(parts))):
            raise Damaged(f"{path / name}: has the rows of another rank")
    return parts


def _read(file: Path, step: int, in_place: bool) -> dict[str, Any]:
    import torch

    in_place &= str(file).encode(errors="ignore").decode() == str(file)  # torch maps files with names in UTF-8 only
    load = partial(torch.load, map_location="cpu", weights_only=True, mmap=in_place)
    try:
        state: dict[str, Any] = patiently(load, file)
    except Damaged:
        raise
    except Exception as error:  # a file that is no archive, or no pickle, raises errors of any type
        from ..common.memory import is_out_of_memory

        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise Damaged(f"{file}: does not load: {type(error).__name__}: {reason}") from None
    parts = {"step": int, "model": dict, "optimizers": list}
    if not isinstance(state, dict) or not all(isinstance(state.get(part), parts[part]) for part in parts):
        raise Damaged(f"{file}: is not the state of a run: has no {', '.join(parts)}")
    if state["step"] != step:
        raise Damaged(f"{file}: is the state of step {state['step']}")
    for part in state.keys() & {"model", "ema"}:  # of earlier versions, if the task had called torch.compile
        state[part] = {".".join(n for n in name.split(".") if n != "_orig_mod"): v for name, v in state[part].items()}
    return state


def span(number: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first row of a rank and the one after its last, of this many rows, by the rule of `torch.chunk`."""
    size = -(-number // ranks)
    return min(rank * size, number), min((rank + 1) * size, number)


def rows_of(
    parts: Sequence[dict[str, Any]], rank: int, ranks: int, memory: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """What one of any number of ranks has, from files that any other number of ranks has written.

    Args:
        parts: what :func:`read_parts` returns. Only the wanted rows are read of the files.
        rank: whose rows; 0 of 1 has the whole state, in the form of one that was never divided.
        ranks: how many there are.
        memory: makes tensors from (shape, dtype) for the result; None: it may be a part of the files' tensors.
    """
    import torch

    from ..training.staging import dotted, map_tensors, named_tensors

    of: dict[str, int] = parts[0]["rows"]["of"]
    theirs = [named_tensors(part) for part in parts]

    def wanted(tensor: torch.Tensor, path: tuple[object, ...]) -> torch.Tensor:
        name = dotted(path)
        if name not in of:  # the same on all ranks
            return tensor.clone() if memory else tensor
        begin, end = span(of[name], rank, ranks)
        pieces = []
        for other, tensors in enumerate(theirs):
            first, last = span(of[name], other, len(parts))
            if len(tensors[name]) != last - first:
                raise Damaged(f"{file_of(other, len(parts))}: {name} has {len(tensors[name])} of {of[name]} rows")
            if max(begin, first) < min(end, last):
                pieces.append(tensors[name][max(begin, first) - first : min(end, last) - first])
        if not memory:
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else tensor[:0]
        found: torch.Tensor = memory((end - begin, *tensor.shape[1:]), tensor.dtype)
        for into, piece in zip(torch.split(found, [len(it) for it in pieces]), pieces, strict=True):
            into.copy_(piece)
        return found

    plain = {name: value for name, value in parts[0].items() if name != "rows"}
    found: dict[str, Any] = map_tensors(plain, wanted)
    return found if ranks == 1 else {**found, "rows": {"rank": rank, "ranks": ranks, "of": of}}


def dump(value: Any, file: IO[bytes]) -> WrittenFile:
    """`torch.save` that returns size and sha256, and reports a full disk as an OSError."""
    import torch

    writer = HashingWriter(file)
    try:
        torch.save(value, writer)  # type: ignore[arg-type]  # it needs no more than write and flush
    except RuntimeError:
        if writer.error:  # torch reports it as a wrong position in the file
            raise writer.error from None
        raise
    file.flush()
    return WrittenFile(writer.bytes, writer.digest.hexdigest())


def entries(folder: Path, pattern: str) -> list[Path]:
    """As `Path.glob`, which since Python 3.12 finds nothing in a folder that cannot be listed: a run would then begin
    at step 0 beside its checkpoints. Here that is an OSError. A folder that does not exist has no entries."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [path for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, pattern)]
    return []


def hidden(folder: Path) -> list[Path]:
    """The folders of checkpoints that are being written or deleted."""
    return entries(folder, ".step-*.tmp")


def replaced(folder: Path) -> dict[Path, Path]:
    """Checkpoints whose step is being written again, or was when a kill came, and the paths that they had."""
    return {path: final_of(path) for path in entries(folder, ".step-*.old")}


def clean(folder: Path) -> None:
    """Delete what a kill in the middle of a save has left in a folder of checkpoints, or finish it. Raises OSError if a
    checkpoint cannot get its name back: without it the run would go on from an older one, or from step 0."""
    if folder.exists():
        with folder_locked(folder) as locked:
            if locked:  # by nobody else: no process is writing, such as one that a keeper has left behind
                clean_locked(folder)
            for old, final in replaced(folder).items():  # its writer may be frozen between two renames
                try:
                    old.replace(final)
                except OSError:  # of two renames only one succeeds; either is right
                    if old.exists() and not final.exists():
                        raise


def clean_locked(folder: Path, idle: float = 0.0) -> None:
    """As :func:`clean`, for the holder of the folder's lock. Another writer may have gone on without the lock, because
    its holder was frozen. So folders stay in which a file is locked, or was written to less than ``idle`` seconds ago.
    """
    for old, final in replaced(folder).items():
        with contextlib.suppress(OSError):  # its writer has just done so
            if final.exists():
                delete(old)
            else:
                old.replace(final)
    for temporary in hidden(folder):
        with contextlib.suppress(OSError):  # its writer has just renamed it, or it cannot be listed
            inside = entries(temporary, "*")
            files = [*inside, *(file for each in inside for file in entries(each, "*"))]
            written = max(it.stat().st_mtime for it in (temporary, *files))
            if time.time() - written >= idle and not any(map(_is_locked, files)):
                delete(temporary)


def _is_locked(path: Path) -> bool:
    """Whether a process has locked a file, on any host."""
    if not path.is_file():
        return False
    with path.open("r+b") as file:  # to write, or NFS refuses
        return not try_lock(file)


def delete(path: Path) -> None:
    """Rename a checkpoint, or what is left of one, then delete it: half of it must not look like a whole one. What
    cannot be deleted keeps its hidden name."""
    doomed = temporary_name(final_of(path))
    with contextlib.suppress(OSError):
        path.replace(doomed)
        shutil.rmtree(doomed)


def set_aside(path: Path, prefix: str = DAMAGED, damage: object = None) -> None:
    """Rename a checkpoint, so that no attempt loads it; of a damaged one log what is wrong with it."""
    aside = path.with_name(f"{prefix}{path.name}-{time.time_ns()}")
    path.replace(aside)
    if damage:
        log.error("%s; set aside as %s, trying the one before", damage, aside.name)

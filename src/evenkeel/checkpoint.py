"""The committed state on disk.

    checkpoints/step-00000042/state.pt        tensors and plain data, nothing else
                              manifest.json   step, kind, host, metrics, what its bits depend on, and each file's
                                              size and sha256

A checkpoint is written under a hidden name of its writer's own and renamed when all of it is on the disk, so a folder
called step-* is complete, and a manifest is beside the very files it tells of. An older one is deleted only after that,
and loses its name first. What a kill in the middle leaves has a hidden name and is cleared away at the next start. A
*snapshot* is a checkpoint that was not planned: what a survivor saved when the job was stopped or had failed.

torch is imported where it is used: to list checkpoints takes a tenth of a second, to import torch two.
"""

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
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, get_args
from uuid import uuid4

from .deadline import FOREVER, left
from .files import sync_folder, write_json
from .naming import TEST, full_name, named

log = logging.getLogger(__name__)

LOCK_PATIENCE = 10.0
"""Seconds for which a planned checkpoint waits for another writer. A rescue has less: what is left of --grace."""

STATE, MANIFEST = "state.pt", "manifest.json"

Kind = Literal["checkpoint", "snapshot"]


class Damaged(Exception):  # noqa: N818
    """A checkpoint that is not what was written; the message names the file and what is wrong."""


@dataclass(frozen=True)
class WrittenFile:
    """What a file of a checkpoint was when it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    time: float
    """When it was written, in seconds since 1970."""
    kind: Kind
    host: str
    """Where it was written; empty if the manifest is older than this field."""
    metrics: dict[str, float]
    """The evaluation at this step, empty if there was none."""
    best_by: tuple[str, str] | None
    """The run's (metric, "max" or "min"); None if the manifest is older than this field."""
    fingerprint: dict[str, str]
    """What its bits depend on (fingerprint.py), by part; empty if the manifest is older than this field."""
    bits_void_from: int | None
    """The step after which its bits may not be those of an undisturbed run; None: they are."""
    files: dict[str, WrittenFile]
    """By name; state.pt is among them."""


@dataclass(frozen=True)
class Checkpoints:
    """A folder of checkpoints of one run. Rank 0 writes it; another rank only what it has survived."""

    folder: Path
    keep: int
    """Newest ones to keep, besides the best."""
    best: tuple[str, str] | None
    """(metric, "max" or "min") that says which one is best. None: none is."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """For the manifests, as is the next."""
    bits_void_from: int | None = None

    @property
    def best_by(self) -> tuple[str, str] | None:
        """The full name of the metric that says which one is best, and how."""
        return (full_name(TEST, self.best[0]), self.best[1]) if self.best else None

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        # os.access says no, instead of raising, where permissions do not let it look
        return [path for path in step_folders(self.folder) if os.access(path / MANIFEST, os.F_OK)]

    def newest_step(self) -> int:
        """Step of the newest checkpoint, 0 if there is none."""
        paths = self.all()
        return step_of(paths[-1]) if paths else 0

    def newest_name(self) -> int:
        """The last step that a folder is named after, whole or not; 0 if there is none."""
        return max(map(step_of, step_folders(self.folder)), default=0)

    def save(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Write a state and then delete what is not to be kept.

        Args:
            state: what `State.capture` gave.
            metrics: the evaluation at this step, if there was one.

        Raises:
            OSError: the disk is full or gone; what was there before is untouched.
        """
        with self._alone(time.monotonic() + LOCK_PATIENCE):
            return self._write(state, metrics, "checkpoint")

    def rescue(self, state: Mapping[str, Any], until: float = FOREVER) -> Path | None:
        """Write a snapshot unless another survivor on this file system has written it, or a newer state, already.

        Args:
            state: what `State.capture` gave.
            until: the moment to which to wait for another writer.

        Returns:
            Where it is now; None if it was there before.

        Raises:
            OSError: the disk is full or gone.
        """
        with self._alone(until):
            return self._write(state, {}, "snapshot") if self.newest_step() < state["step"] else None

    def clear_snapshots(self, before: int) -> None:
        """Delete the snapshots that this host has written at steps below ``before``.

        For a node without rank 0, whose folder nobody prunes: once rank 0 has a later checkpoint, they are leftovers.
        On a shared file system the folder is rank 0's too, so planned checkpoints and the snapshots of other hosts
        stay. What cannot be deleted is left: it costs room and nothing else.
        """
        with contextlib.suppress(OSError):
            for path in self.all():
                if step_of(path) < before and _is_snapshot_of(path, socket.gethostname()):
                    self._delete(path)

    @contextlib.contextmanager
    def _alone(self, until: float) -> Iterator[None]:
        """Keep other writers out: another rank, or another thread of this process.

        The kernel frees the lock of a holder that dies. One that is frozen, perhaps in the middle of this very step,
        must not keep the others from saving. So at some moment they go ahead, which costs room and nothing else: each
        writes under a name of its own, and gives it up where another one has been faster.

        Args:
            until: that moment.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if not left(until):
                    break
                time.sleep(0.02)
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # or a loader process that was forked meanwhile would go on holding it
            os.close(lock)

    def _write(self, state: Mapping[str, Any], metrics: Mapping[str, float], kind: Kind) -> Path:
        final = self.folder / f"step-{state['step']:08d}"
        temporary = self.folder / f".{final.name}.{uuid4().hex}.tmp"
        temporary.mkdir(parents=True)
        try:
            with (temporary / STATE).open("wb") as file:
                written = dump(dict(state), file)
                os.fsync(file.fileno())
            manifest = {
                "step": state["step"],
                "time": time.time(),
                "kind": kind,
                "host": socket.gethostname(),
                "metrics": named(TEST, metrics),
                "best_by": self.best_by,
                "fingerprint": self.fingerprint,
                "bits_void_from": self.bits_void_from,
                "files": {STATE: asdict(written)},
            }
            write_json(temporary / MANIFEST, manifest)
            replaced = self.folder / f".{final.name}.old"
            again = kind == "checkpoint" or not (final / MANIFEST).exists()
            if again and final.exists():  # the same step, set down by an earlier attempt
                shutil.rmtree(replaced, ignore_errors=True)
                final.replace(replaced)
            try:
                temporary.replace(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # by another writer meanwhile, and after the same step all ranks have the same state
            sync_folder(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune()
        return final

    def newest_manifest(self) -> Manifest | None:
        """That of the newest checkpoint which has a readable one; none of its files is looked at."""
        for path in reversed(self.all()):
            with contextlib.suppress(Damaged):
                return read_manifest(path)
        return None

    def load_newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole; damaged ones are reported and set aside, not deleted."""
        self._clear_away()
        for path in reversed(step_folders(self.folder)):
            try:
                return load(path)
            except Damaged as damage:
                aside = path.with_name(f"damaged-{path.name}-{time.time_ns()}")
                path.replace(aside)
                log.error("%s; set aside as %s, trying the one before", damage, aside.name)
        return None

    def best_value(self) -> float | None:
        """The best metric among the checkpoints there are."""
        values = [value for path in self.all() if (value := self._value(path)) is not None]
        return (max if self._most else min)(values) if values else None

    def best_path(self) -> Path | None:
        """The checkpoint with the best metric, the newest of several; None if no evaluation came with any."""
        best = self.best_value()
        holders = [path for path in self.all() if best is not None and self._value(path) == best]
        return holders[-1] if holders else None

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than that of every checkpoint there is."""
        value = self._of(metrics)
        if value is None:
            return False
        known = self.best_value()
        return known is None or (value > known if self._most else value < known)

    def _value(self, path: Path) -> float | None:
        try:
            return self._of(read_manifest(path).metrics)
        except Damaged:
            return None

    @property
    def _most(self) -> bool:
        return self.best is not None and self.best[1] == "max"

    def _of(self, metrics: Mapping[str, float]) -> float | None:
        """The value that counts. NaN is neither better nor worse than anything, so it can be no best one."""
        value = named(TEST, metrics).get(self.best_by[0]) if self.best_by else None
        return None if value is None or math.isnan(value) else value

    def _prune(self) -> None:
        best = self.best_path()
        for path in self.all()[: -self.keep]:
            if path != best:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint that loses its name first; one that cannot be deleted stays."""
        unnamed = self.folder / f".{path.name}.tmp"
        with contextlib.suppress(OSError):
            path.replace(unnamed)
            shutil.rmtree(unnamed)

    def _clear_away(self) -> None:
        """What a kill in the middle of `save` has left."""
        for replaced in self.folder.glob(".step-*.old"):
            final = self.folder / replaced.name[1 : -len(".old")]
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.replace(final)
        for temporary in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(temporary, ignore_errors=True)


def step_folders(folder: Path) -> list[Path]:
    """Everything in a folder that has a checkpoint's name, whole or not, by step."""
    return sorted((path for path in folder.glob("step-*") if is_step_folder(path)), key=step_of)


def is_step_folder(path: Path) -> bool:
    """Whether a path has a checkpoint's name."""
    return re.fullmatch(r"step-\d+", path.name) is not None


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(path.name.removeprefix("step-"))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU, after checking that it is what was written.

    Returns:
        What `State.capture` gave: "step", "model" and "optimizers".

    Raises:
        Damaged: as :func:`verify` and :func:`unpack`.
    """
    verify(path)
    return unpack(path)


def unpack(path: Path, in_place: bool = False) -> dict[str, Any]:
    """What :func:`load` does after the check. A file may be what its manifest says and still be no state.

    Loads nothing but tensors and plain data (``weights_only``), so a checkpoint cannot run code.

    Args:
        path: the checkpoint's folder.
        in_place: leave the tensors in the file until they are looked at.

    Raises:
        Damaged: it does not load, or is not the state of this step.
    """
    import torch

    file = path / STATE
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=in_place)
    except Exception as error:  # what comes of a file that is no archive, or no pickle, is of any type
        from .mistakes import is_out_of_memory

        if is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise Damaged(f"{file}: does not load: {type(error).__name__}: {reason}") from None
    parts = {"step": int, "model": dict, "optimizers": list}
    if not isinstance(state, dict) or not all(isinstance(state.get(part), parts[part]) for part in parts):
        raise Damaged(f"{file}: is not the state of a run: has no {', '.join(parts)}")
    if state["step"] != step_of(path):
        raise Damaged(f"{file}: is the state of step {state['step']}")
    for part in state.keys() & {"model", "ema"}:  # of earlier versions, if the task had called torch.compile
        state[part] = {".".join(n for n in name.split(".") if n != "_orig_mod"): v for name, v in state[part].items()}
    return state


def verify(path: Path, advance: Callable[[int], object] = lambda _: None) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest.

    Args:
        path: its folder.
        advance: gets the number of bytes of each block that has been read.

    Raises:
        Damaged: a file is missing or not readable, or its size or sha256 differs from the manifest.
    """
    manifest = read_manifest(path)
    for name, written in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != written.bytes:
                raise Damaged(f"{file}: has {size} bytes, should have {written.bytes} bytes")
            with file.open("rb") as opened:
                digest = _sha256(opened, advance)
        except OSError as error:
            raise Damaged(f"{file}: cannot be read: {error.strerror or error}") from None
        if digest != written.sha256:
            raise Damaged(f"{file}: sha256 is {digest}, the manifest says {written.sha256}")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself; nothing of it is checked against the files.

    Raises:
        Damaged: there is no manifest, it is not readable, or it is not this folder's.
    """
    file = path / MANIFEST
    try:
        content = json.loads(file.read_text())
        kind, best_by = content.get("kind", "checkpoint"), content.get("best_by")
        if kind not in get_args(Kind) or content["step"] != step_of(path):
            raise ValueError(f"{kind} of step {content['step']}")
        void_from = content.get("bits_void_from")
        files = {str(name): WrittenFile(int(f["bytes"]), str(f["sha256"])) for name, f in content["files"].items()}
        return Manifest(
            step=step_of(path),
            time=float(content["time"]),
            kind=kind,
            host=str(content.get("host", "")),
            metrics={name: float(value) for name, value in named(TEST, content["metrics"]).items()},
            best_by=(full_name(TEST, best_by[0]), str(best_by[1])) if best_by else None,
            fingerprint={str(name): str(value) for name, value in content.get("fingerprint", {}).items()},
            bits_void_from=None if void_from is None else int(void_from),
            files={STATE: files[STATE]} | files,
        )
    except OSError as error:
        raise Damaged(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise Damaged(f"{file}: is not this checkpoint's manifest ({type(error).__name__}: {error})") from None


def dump(value: Any, file: IO[bytes]) -> WrittenFile:
    """`torch.save` that says what it has written, and tells a full disk by its name.

    Raises:
        OSError: from the file.
    """
    import torch

    writer = _HashingWriter(file)
    try:
        torch.save(value, writer)  # type: ignore[arg-type]  # it needs no more than write and flush
    except RuntimeError:
        if writer.error:  # torch reports it as a wrong position in the file
            raise writer.error from None
        raise
    file.flush()
    return WrittenFile(writer.bytes, writer.digest.hexdigest())


def _is_snapshot_of(path: Path, host: str) -> bool:
    try:
        manifest = read_manifest(path)
    except Damaged:
        return False
    return (manifest.kind, manifest.host) == ("snapshot", host)


class _HashingWriter:
    """A file that knows its size and sha256 when it is written, without being read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _sha256(file: IO[bytes], advance: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()

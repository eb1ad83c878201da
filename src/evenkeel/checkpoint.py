"""The committed state on disk.

    checkpoints/step-00000042/state.pt        tensors and plain data, nothing else
                              manifest.json   step, metrics, and each file's size and sha256

A checkpoint is written under a hidden name and renamed when all of it is on the disk, so a folder called step-*
is complete. An older one is deleted only after that, and loses its name first. What a kill in the middle leaves
has a hidden name and is cleared away at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from .files import read_json, sync_folder, write_json

log = logging.getLogger(__name__)

LOCK_PATIENCE = 10.0
"""Seconds to wait for another writer; well inside the grace that a signal leaves."""

STATE, MANIFEST = "state.pt", "manifest.json"


class Damaged(Exception):  # noqa: N818
    """A checkpoint that is not what was written; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Checkpoints:
    """A folder of checkpoints of one run. Rank 0 writes it; another rank only what it has survived."""

    folder: Path
    keep: int
    """Newest ones to keep, besides the best."""
    best: tuple[str, str]
    """(metric, "max" or "min") that says which one is best."""

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        named = [path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return sorted((path for path in named if (path / MANIFEST).is_file()), key=_step)

    def newest_step(self) -> int:
        """Step of the newest checkpoint, 0 if there is none."""
        paths = self.all()
        return _step(paths[-1]) if paths else 0

    def save(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Write a state and then delete what is not to be kept.

        Args:
            state: what `State.capture` gave.
            metrics: the evaluation at this step, if there was one.

        Raises:
            OSError: the disk is full or gone; what was there before is untouched.
        """
        with self._alone():
            return self._write(state, metrics)

    def rescue(self, state: Mapping[str, Any]) -> Path | None:
        """Write a state unless another survivor on this file system has written it, or a newer one, already.

        Returns:
            Where it is now; None if it was there before.

        Raises:
            OSError: the disk is full or gone.
        """
        with self._alone():
            return self._write(state, {}) if self.newest_step() < state["step"] else None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other writers out: another rank, or another thread of this process.

        The kernel frees the lock of a holder that dies. One that is frozen must not keep the others from saving, so
        after a while they go ahead; names of what is being written are their own.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + LOCK_PATIENCE
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
            yield
        finally:
            os.close(lock)

    def _write(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        final = self.folder / f"step-{state['step']:08d}"
        temporary = self.folder / f".{final.name}.{socket.gethostname()}-{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            with (temporary / STATE).open("wb") as file:
                writer = _HashingWriter(file)
                try:
                    torch.save(dict(state), writer)  # type: ignore[arg-type]  # it needs no more than write and flush
                except RuntimeError:
                    if writer.error:  # torch reports it as a wrong position in the file
                        raise writer.error from None
                    raise
                writer.sync()
            manifest = {
                "step": state["step"],
                "time": time.time(),
                "metrics": dict(metrics),
                "files": {STATE: {"bytes": writer.bytes, "sha256": writer.digest.hexdigest()}},
            }
            write_json(temporary / MANIFEST, manifest)
            replaced = self.folder / f".{final.name}.old"
            if final.exists():  # the same step, set down by an earlier attempt
                shutil.rmtree(replaced, ignore_errors=True)
                final.replace(replaced)
            temporary.replace(final)
            sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune()
        return final

    def load_newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole; damaged ones are reported and set aside, not deleted."""
        self._clear_away()
        for path in reversed(self.all()):
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
        return (max if self.best[1] == "max" else min)(values) if values else None

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than that of every checkpoint there is."""
        value, known = _finite(metrics.get(self.best[0])), self.best_value()
        if value is None:
            return False
        return known is None or (value > known if self.best[1] == "max" else value < known)

    def _value(self, path: Path) -> float | None:
        try:
            return _finite(_manifest(path)["metrics"].get(self.best[0]))
        except Damaged:
            return None

    def _prune(self) -> None:
        paths, best = self.all(), self.best_value()
        holders = [path for path in paths if best is not None and self._value(path) == best]
        for path in paths[: -self.keep]:
            if path not in holders[-1:]:
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


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint on the CPU, after checking that it is what was written.

    Loads nothing but tensors and plain data (``weights_only``), so a checkpoint cannot run code.

    Raises:
        Damaged: a file is missing or not readable, or its size or sha256 differs from the manifest.
    """
    for name, expected in _manifest(path)["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            raise Damaged(f"{file}: should have {expected['bytes']} bytes")
        with file.open("rb") as opened:
            digest = _sha256(opened)
        if digest != expected["sha256"]:
            raise Damaged(f"{file}: sha256 is {digest}, the manifest says {expected['sha256']}")
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _finite(value: float | None) -> float | None:
    """NaN is neither better nor worse than anything, so it can be no best value."""
    return None if value is None or math.isnan(value) else value


def _manifest(path: Path) -> dict[str, Any]:
    manifest = path / MANIFEST
    try:
        content = read_json(manifest)
        files = {str(name): {"bytes": f["bytes"], "sha256": f["sha256"]} for name, f in content["files"].items()}
        return {"metrics": dict(content["metrics"]), "files": {STATE: files[STATE]} | files}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{manifest}: is missing or not a manifest ({type(error).__name__}: {error})") from None


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

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()

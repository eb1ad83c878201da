"""The committed state on disk.

    checkpoints/step-00000042/state.pt        tensors and plain data, nothing else (sharded: see state_files.py)
                              manifest.json   see :class:`Manifest`

A checkpoint is written under a hidden name and renamed when all of it is on the disk, so a folder called step-* is
complete. Older ones are deleted only after that, and are renamed first. What a kill in the middle leaves has a hidden
name; the next start deletes or restores it. A *snapshot* is an unplanned checkpoint: a surviving rank saved it when the
job was stopped or had failed.

torch is imported where it is used: listing checkpoints takes a tenth of a second, importing torch two.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from ..common.deadlines import FOREVER
from ..common.files import folder_locked, read_json, sha256_of, sync_folder, unfinished, write_json
from ..common.naming import TEST, full_name, named
from .state_files import STATE as STATE
from .state_files import Damaged as Damaged
from .state_files import Want, WrittenFile, clean, clean_locked, dump, read_state, replaced, set_aside, state_files

LEFT_BEHIND = 600.0
"""Seconds without a write, after which an incomplete checkpoint is one of a killed process."""

WRITER_TIMEOUT = 10.0
"""Seconds that a planned checkpoint waits for another writer. A rescue waits for the first half of --grace."""

MANIFEST = "manifest.json"

Kind = Literal["checkpoint", "snapshot"]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. Older ones lack some fields, which are then empty or None."""

    step: int
    time: float
    """The time of writing, in seconds since 1970."""
    kind: Kind
    host: str
    metrics: dict[str, float]
    """The evaluation at this step, empty if there was none."""
    best_by: tuple[str, str] | None
    """The run's (metric, "max" or "min")."""
    fingerprint: dict[str, str]
    """The facts that its bits depend on (fingerprint.py), by part."""
    bits_void_from: int | None
    """The step after which its bits may differ from those of an undisturbed run; None: they do not."""
    files: dict[str, WrittenFile]
    """Its files by name; those with the state (state_files.py) are among them."""
    keep_every: int = 0
    """The run's --keep-every when it was written."""

    @property
    def kept_for_ever(self) -> bool:
        """True for a checkpoint of --keep-every, whatever that option is by now."""
        return bool(self.keep_every) and self.step % self.keep_every == 0


@dataclass
class Provenance:
    """What all checkpoints of a run say of it (see `Manifest`). `Attempt` owns it; its fields say who else sets them.

    Nothing of it changes after the first evaluation.
    """

    best_by: tuple[str, str] | None = None
    """(full name of a metric, "max" or "min") that decides which is best; None: none. Set by `Resume`, and by
    `Evaluator`, as only an evaluation shows whether the loss is the only metric."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """`Attempt` completes it when the cut is decided; `Resume` sets rank 0's on all ranks."""
    bits_void_from: int | None = None
    """Set by `Resume`."""
    run_id: str = ""
    """The run's, in status.json; set by `Attempt` once the start is recorded. A process that finds another one there is
    left of the run before, and writes nothing; empty: it does not look."""


@dataclass
class Checkpoints:
    """The folder of a run's checkpoints. Rank 0 writes it; another rank writes only rescues."""

    folder: Path
    """In a run an absolute path: the task may change the working directory."""
    keep: int
    """Newest ones to keep, besides the best ones."""
    provenance: Provenance = field(default_factory=Provenance)
    keep_best: int = 1
    """Best ones to keep, besides the newest."""
    keep_every: int = 0
    """Keep those whose step is a multiple of this for ever; 0: none."""

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        # without permission to look, os.access returns False and does not raise
        return [path for path in step_folders(self.folder) if os.access(path / MANIFEST, os.F_OK)]

    def newest_step(self) -> int:
        """Step of the newest complete checkpoint, 0 if there is none."""
        return max(map(step_of, self.all()), default=0)

    def newest_named_step(self) -> int:
        """The last step that a folder is named after, or was (see `replaced`), complete or not; 0 if there is none."""
        return max(map(step_of, [*step_folders(self.folder), *replaced(self.folder).values()]), default=0)

    def save(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Write the result of `State.capture`, with the evaluation at this step, and delete old checkpoints.

        Raises:
            OSError: the disk is full or gone; older checkpoints are untouched.
        """
        with self.locked(time.monotonic() + WRITER_TIMEOUT) as alone:
            if alone:  # or ranks that are killed while they save fill the disk: a start from memory does not clean
                clean_locked(self.folder, LEFT_BEHIND)
            return self._write(state, metrics, "checkpoint")

    def save_if_new(
        self,
        state: Mapping[str, Any],
        until: float = FOREVER,
        metrics: Mapping[str, float] = MappingProxyType({}),
        kind: Kind = "snapshot",
    ) -> Path | None:
        """Write a checkpoint and return its path, unless it exists already; a snapshot also unless a later one exists.

        Waits for another writer until a moment of the monotonic clock. Raises OSError as :meth:`save`.
        """
        with self.locked(until):
            if kind == "snapshot":
                exists = self.newest_step() >= state["step"]
            else:  # it also replaces a snapshot of its step, which has no evaluation
                exists = any((m.step, m.kind) == (state["step"], kind) for _, m in self._manifests())
            return None if exists else self._write(state, metrics, kind)

    def manifest(self, step: int, metrics: Mapping[str, float], kind: Kind) -> Manifest:
        """The manifest of a checkpoint that is written now, without its files, which are not known yet."""
        it, host = self.provenance, socket.gethostname()
        return Manifest(
            step, time.time(), kind, host, named(TEST, metrics), best_by=it.best_by, fingerprint=it.fingerprint,
            bits_void_from=it.bits_void_from, files={}, keep_every=self.keep_every,
        )  # fmt: skip

    def clear_snapshots(self, before: int) -> None:
        """Delete the snapshots of this host at steps below ``before``: leftovers, once rank 0 has a later checkpoint.

        Called on a node without rank 0. On a shared file system the folder is rank 0's too, so planned checkpoints and
        the snapshots of other hosts stay.
        """
        for path, manifest in self._manifests():
            mine = (manifest.kind, manifest.host) == ("snapshot", socket.gethostname())
            if mine and manifest.step < before and not manifest.kept_for_ever:
                self._delete(path)

    @contextlib.contextmanager
    def locked(self, until: float) -> Iterator[bool]:
        """Lock out other writers; yields whether there is no other. Waits as long as another one makes progress, and at
        least until a moment.

        Two at once only cost time and space: each writes under its own name and gives up if the other was faster.
        Raises OSError as :func:`refuse_stale_writer`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with folder_locked(self.folder, until) as alone:
            refuse_stale_writer(self)
            yield alone

    def _write(self, state: Mapping[str, Any], metrics: Mapping[str, float], kind: Kind) -> Path:
        step = state["step"]
        final = self.folder / f"step-{step:08d}"
        temporary = unfinished(final)
        temporary.mkdir()
        try:
            with (temporary / STATE).open("wb") as file:
                files = {STATE: dump(dict(state), file)}
                os.fsync(file.fileno())
            write_json(temporary / MANIFEST, asdict(replace(self.manifest(step, metrics, kind), files=files)))
            self.publish(temporary, final, kind)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def publish(self, temporary: Path, final: Path, kind: Kind) -> None:
        """Give a folder with all files of a checkpoint its name, and delete old ones. Raises OSError as `locked`."""
        refuse_stale_writer(self)  # again: this process may have been frozen while it wrote
        old = self.folder / f".{final.name}.old"
        replaces = kind == "checkpoint" or not (final / MANIFEST).exists()
        if replaces and final.exists():  # the same step, written by an earlier attempt
            shutil.rmtree(old, ignore_errors=True)
            final.replace(old)
        try:
            temporary.replace(final)
        except OSError as error:
            # not if another writer was faster: after the same step all ranks have the same state
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                if old.exists() and not final.exists():
                    old.replace(final)
                raise
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._delete_old()

    def _delete_old(self) -> None:
        kept = {*self.best_paths(), *(path for path, manifest in self._manifests() if manifest.kept_for_ever)}
        for path in self.all()[: -self.keep]:
            if path not in kept:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        """Rename a checkpoint, then delete it; one that cannot be deleted stays."""
        unnamed = self.folder / f".{path.name}.tmp"
        with contextlib.suppress(OSError):
            path.replace(unnamed)
            shutil.rmtree(unnamed)

    def newest_manifest(self, *, step: int | None = None) -> Manifest | None:
        """The newest readable manifest, or that of a step; its files are not checked."""
        return next((manifest for _, manifest in self._manifests() if step in (None, manifest.step)), None)

    def _manifests(self) -> Iterator[tuple[Path, Manifest]]:
        """Yield the checkpoints whose manifest can be read, the newest first."""
        for path in reversed(self.all()):
            with contextlib.suppress(Damaged):
                yield path, read_manifest(path)

    def load_newest(self, *, step: int | None = None) -> dict[str, Any] | None:
        """The newest checkpoint that is complete and undamaged, or that of this step; None if there is none. Those that
        it finds damaged are reported and set aside."""
        clean(self.folder)
        for path in reversed(step_folders(self.folder)):
            if step in (None, step_of(path)):
                try:
                    return load(path)
                except Damaged as damage:
                    set_aside(path, damage)
        return None

    def best_path(self) -> Path | None:
        """The checkpoint with the best metric, the oldest of several; None if none has an evaluation."""
        return next(iter(self.best_paths()), None)

    def best_paths(self) -> list[Path]:
        """The `keep_best` checkpoints with the best metrics, the best first, of equal ones the oldest first."""
        scores = {path: score for path, score in self._scores().items() if score > -math.inf}
        return sorted(scores, key=lambda path: (-scores[path], step_of(path)))[: self.keep_best]

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation would be among the `keep_best` best ones; one that is as good as the last is not."""
        best = sorted(self._scores().values(), reverse=True)[: self.keep_best]
        return self._score(metrics) > (best[-1] if len(best) == self.keep_best else -math.inf)

    def _scores(self) -> dict[Path, float]:
        """Each checkpoint's score, newest first."""
        return {path: self._score(manifest.metrics) for path, manifest in self._manifests()}

    def _score(self, metrics: Mapping[str, float]) -> float:
        """The deciding metric, with a sign so that greater is better; -inf if it is missing or NaN."""
        name, mode = self.provenance.best_by or ("", "")
        value = named(TEST, metrics).get(name, math.nan)
        if math.isnan(value):
            return -math.inf
        return value if mode == "max" else -value


def refuse_stale_writer(checkpoints: Checkpoints) -> None:
    """Raise an OSError if another run has begun in the folder (--fresh): this process is left of the one before."""
    with contextlib.suppress(ValueError):  # a status.json that was damaged says nothing
        now, mine = read_json(checkpoints.folder.parent / "status.json").get("run_id"), checkpoints.provenance.run_id
        if now and mine and now != mine:
            raise OSError(errno.ESTALE, "another run has begun there, so nothing is written", str(checkpoints.folder))


def facts_of(checkpoints: Checkpoints, step: int, metrics: Mapping[str, float], kind: Kind) -> dict[str, Any]:
    """What a keeper's child, which has not the run's objects, must know to write a state: the manifest, and how to keep
    it. A rank calls this."""
    more = {"folder": str(checkpoints.folder), "run_id": checkpoints.provenance.run_id, "keep": checkpoints.keep}
    return asdict(checkpoints.manifest(step, metrics, kind)) | more | {"keep_best": checkpoints.keep_best}


def checkpoints_of(facts: Mapping[str, Any]) -> Checkpoints:
    """The folder that :func:`facts_of` has described."""
    it = manifest_of(dict(facts))
    provenance = Provenance(it.best_by, it.fingerprint, it.bits_void_from, facts["run_id"])
    return Checkpoints(Path(facts["folder"]), facts["keep"], provenance, facts["keep_best"], it.keep_every)


def known_step(checkpoints: Checkpoints) -> int | str:
    """The newest step, for a message about an error of the disk: "?" if its folder cannot be read either."""
    try:
        return checkpoints.newest_step()
    except OSError:
        return "?"


def step_folders(folder: Path) -> list[Path]:
    """Everything in a folder that has a checkpoint's name, complete or not, by step."""
    return sorted((path for path in folder.glob("step-*") if is_step_folder(path)), key=step_of)


def is_step_folder(path: Path) -> bool:
    """Whether a path has a checkpoint's name."""
    return re.fullmatch(r"step-\d+", path.name) is not None


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def load(path: Path, want: Want = "all") -> dict[str, Any]:
    """Verify and read a checkpoint on the CPU: the result of `State.capture`, or what is wanted of it.

    Raises:
        Damaged: as :func:`verify`; or it does not load without running code, or is not the state of this step.
    """
    verify(path)
    return read_state(path, step_of(path), want)


def verify(path: Path, advance: Callable[[int], object] = lambda _: None, rank: int = 0, ranks: int = 1) -> Manifest:
    """Read every file of a checkpoint and compare its size and sha256 with the manifest; each of several ranks a part.
    ``advance`` gets the number of bytes of each block that is read.

    Raises:
        Damaged: a file is missing, not readable or different.
    """
    manifest = read_manifest(path)
    for name, written in list(manifest.files.items())[rank::ranks]:
        file = path / name
        try:
            if (size := file.stat().st_size) != written.bytes:
                raise Damaged(f"{file}: has {size} bytes, should have {written.bytes} bytes")
            digest = sha256_of(file, advance)
        except OSError as error:
            raise Damaged(f"{file}: cannot be read: {error.strerror or error}") from None
        if digest != written.sha256:
            raise Damaged(f"{file}: sha256 is {digest}, the manifest says {written.sha256}")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, not checked against its files.

    Raises:
        Damaged: there is no manifest, it is not readable, or it is not this folder's.
    """
    file = path / MANIFEST
    try:
        manifest = manifest_of(content := json.loads(file.read_text()))
        if content["step"] != step_of(path):
            raise ValueError(f"{manifest.kind} of step {content['step']}")
        # those of the state first, in the order of ranks; if one is missing, the manifest is damaged
        states = {name: manifest.files[name] for name in state_files(manifest.files)}
        return replace(manifest, files=states | manifest.files)
    except OSError as error:
        raise Damaged(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise Damaged(f"{file}: is not this checkpoint's manifest ({type(error).__name__}: {error})") from None


def manifest_of(content: dict[str, Any]) -> Manifest:
    """A manifest from its JSON; raises a ValueError, TypeError, LookupError and the like if it is none."""
    kind, best_by, void_from = content.get("kind", "checkpoint"), content.get("best_by"), content.get("bits_void_from")
    if kind not in get_args(Kind):
        raise ValueError(f"{kind} of step {content['step']}")
    return Manifest(
        step=int(content["step"]),
        time=float(content["time"]),
        kind=kind,
        host=str(content.get("host", "")),
        metrics={name: float(value) for name, value in named(TEST, content["metrics"]).items()},
        best_by=(full_name(TEST, best_by[0]), str(best_by[1])) if best_by else None,
        fingerprint={str(name): str(value) for name, value in content.get("fingerprint", {}).items()},
        bits_void_from=None if void_from is None else int(void_from),
        files={str(name): WrittenFile(int(f["bytes"]), str(f["sha256"])) for name, f in content["files"].items()},
        keep_every=int(content.get("keep_every", 0)),
    )

"""The folder of a run's checkpoints: writing them, which ones stay, and the newest that is undamaged.

A checkpoint (manifest.py) is written under a hidden name and renamed when all of it is on the disk. A *snapshot* is an
unplanned one, of a job that was stopped or failed. Names in the folder:

    step-N                 complete
    .step-N.*.tmp          being written or deleted; left by a kill: the next start deletes it
    .step-N.*.old          replaced by the same step, written again; left by a kill: restored, if step-N is missing
    .lock                  locked by the process that writes
    damaged-*, wrong-*     set aside, by a start that found it damaged, or by --verify-every; stays
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..common.deadlines import FOREVER
from ..common.files import (
    LOCK,
    folder_locked,
    make_folder,
    read_json,
    sync_folder,
    temporary_name,
    try_lock,
    write_json,
)
from ..common.naming import TEST, Kind, named
from .manifest import MANIFEST, Manifest, Provenance, load, manifest_of, read_manifest, step_folders, step_of
from .state_files import STATE, Damaged, Unreadable, clean, clean_locked, delete, dump, folder_of, replaced, set_aside

LEFT_BEHIND = 600.0
"""Seconds without a write, after which an incomplete checkpoint is one of a killed process."""

WRITER_TIMEOUT = 10.0
"""Seconds that a planned checkpoint waits for another writer. A rescue waits for the first half of --grace."""


@dataclass
class Checkpoints:
    """The folder of a run's checkpoints. Rank 0 writes it; other ranks rescues, or rows."""

    folder: Path
    """In a run an absolute path: the task may change the working directory."""
    keep: int
    """Newest ones to keep, besides the best ones."""
    provenance: Provenance = field(default_factory=Provenance)
    keep_best: int = 1
    """Best ones to keep, besides the newest."""
    keep_every: int = 0
    """Keep those whose step is a multiple of this for ever; 0: none."""
    verify_every: int = 0
    """--verify-every: also keep the newest one before the last step that was compared."""

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        # without permission to look, os.access returns False and does not raise
        return [path for path in step_folders(self.folder) if os.access(path / MANIFEST, os.F_OK)]

    def newest_step(self) -> int:
        """Step of the newest complete checkpoint, 0 if there is none."""
        return max(map(step_of, self.all()), default=0)

    def newest_named_step(self) -> int:
        """Step of the newest checkpoint, complete or not, or of a newer *.old (`replaced`); 0 if there is none."""
        return max(map(step_of, [*step_folders(self.folder), *replaced(self.folder).values()]), default=0)

    def save(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Write the result of `State.capture`, with the evaluation at this step, and delete old checkpoints.

        Raises:
            OSError: the disk is full or gone; older checkpoints are untouched.
        """
        with self.writer_locked(time.monotonic() + WRITER_TIMEOUT) as alone:
            if alone:  # clean here too: a start from memory does not, and killed writers would fill the disk
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
        with self.writer_locked(until):
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
                delete(path)

    @contextlib.contextmanager
    def writer_locked(self, until: float) -> Iterator[bool]:
        """Lock out other writers: waits for another one until a moment, and longer while its process runs. Yields
        whether there is no other now.

        Two at once only cost time and space: each writes under its own name and gives up if the other was faster.
        Raises OSError as :func:`check_not_stale`.
        """
        make_folder(self.folder)
        with folder_locked(self.folder, until) as alone:
            check_not_stale(self)
            yield alone

    def _write(self, state: Mapping[str, Any], metrics: Mapping[str, float], kind: Kind) -> Path:
        step = state["step"]
        final = self.folder / folder_of(step)
        temporary = temporary_name(final)
        temporary.mkdir()
        try:
            with (temporary / STATE).open("wb") as file:
                try_lock(file, time.monotonic() + 1)  # so that cleaning spares it, even without the folder's lock
                files = {STATE: dump(dict(state), file)}
                os.fsync(file.fileno())
                write_json(temporary / MANIFEST, asdict(replace(self.manifest(step, metrics, kind), files=files)))
                self.publish(temporary, final, kind)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def publish(self, temporary: Path, final: Path, kind: Kind) -> None:
        """Give a folder with all files of a checkpoint its name, and delete old ones. May raise an OSError.

        1. A folder of this step becomes *.old, unless this is a snapshot and that one is whole.
        2. The new one gets the name. If another writer was faster, its one stays; at another error *.old gets the name
           back. After a kill between 1 and 2 `clean` does that.
        3. The folder is synced; only then *.old and checkpoints beyond --keep are deleted.
        """
        check_not_stale(self)  # again: this process may have been frozen while it wrote
        old = temporary_name(final).with_suffix(".old")  # this process's own: another may be here too
        replaces = kind == "checkpoint" or not (final / MANIFEST).exists()
        if replaces and temporary.exists():  # another rank of a sharded run may have published it
            with contextlib.suppress(FileNotFoundError):  # it exists only if an earlier attempt saved this step
                final.replace(old)
        try:
            temporary.replace(final)
        except OSError as error:
            # another writer was faster: as good as saved, since after the same step all ranks have the same state
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not (final / MANIFEST).exists():
                with contextlib.suppress(OSError):  # there was none, or another writer has published one meanwhile
                    old.replace(final)
                raise
        (final / LOCK).unlink(missing_ok=True)  # of a sharded run, whose ranks write into one folder
        sync_folder(self.folder)
        delete(old)
        self._delete_old()

    def _delete_old(self) -> None:
        paths = self.all()
        manifests, kept = dict[Path, Manifest](), {*paths[-self.keep :]}
        for path in paths:
            try:
                manifests[path] = read_manifest(path, pauses=())
            except Unreadable:  # perhaps only now, and it may be the best one
                kept.add(path)
            except Damaged:
                pass
        kept |= {*self._best_of(manifests), *(path for path, manifest in manifests.items() if manifest.kept_for_ever)}
        if (every := self.verify_every) and paths:  # a run whose state has drifted goes back to it (`Verification`)
            last_verified = step_of(paths[-1]) // every * every
            kept.update([path for path in paths if step_of(path) < last_verified][-1:])
        for path in paths:
            if path not in kept:
                delete(path)

    def newest_manifest(self, *, step: int | None = None) -> Manifest | None:
        """The newest readable manifest, or that of a step; its files are not checked."""
        return next((manifest for _, manifest in self._manifests() if step in (None, manifest.step)), None)

    def _manifests(self) -> Iterator[tuple[Path, Manifest]]:
        """Yield the checkpoints whose manifest can be read, the newest first."""
        for path in reversed(self.all()):
            with contextlib.suppress(Damaged):
                yield path, read_manifest(path, pauses=())  # a bad sector must not delay each evaluation

    def load_newest(self, *, step: int | None = None) -> dict[str, Any] | None:
        """The newest checkpoint that is complete and undamaged, or that of this step; None if there is none. Those that
        it finds damaged are reported and set aside."""
        clean(self.folder)
        for path in reversed(step_folders(self.folder)):
            if step in (None, step_of(path)):
                try:
                    return load(path)
                except Damaged as damage:
                    set_aside(path, damage=damage)
        return None

    def best_path(self) -> Path | None:
        """The checkpoint with the best metric, the oldest of several; None if none has an evaluation."""
        return next(iter(self.best_paths()), None)

    def best_paths(self) -> list[Path]:
        """The `keep_best` checkpoints with the best metrics, the best first, of equal ones the oldest first."""
        return self._best_of(dict(self._manifests()))

    def _best_of(self, manifests: Mapping[Path, Manifest]) -> list[Path]:
        scores = {path: self._score(manifest.metrics) for path, manifest in manifests.items()}
        found = [path for path in scores if scores[path] > -math.inf]
        return sorted(found, key=lambda path: (-scores[path], step_of(path)))[: self.keep_best]

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation would be among the `keep_best` best ones; one that is as good as the last is not."""
        best = sorted((self._score(it.metrics) for _, it in self._manifests()), reverse=True)[: self.keep_best]
        return self._score(metrics) > (best[-1] if len(best) == self.keep_best else -math.inf)

    def _score(self, metrics: Mapping[str, float]) -> float:
        """The deciding metric, with a sign so that greater is better; -inf if it is missing or NaN."""
        name, mode = self.provenance.best_by or ("", "")
        value = named(TEST, metrics).get(name, math.nan)
        if math.isnan(value):
            return -math.inf
        return value if mode == "max" else -value


def check_not_stale(checkpoints: Checkpoints) -> None:
    """Raise an OSError if another run has begun in the folder (--fresh): this process is a leftover of the last one."""
    with contextlib.suppress(ValueError):  # a status.json that was damaged says nothing
        now, mine = read_json(checkpoints.folder.parent / "status.json").get("run_id"), checkpoints.provenance.run_id
        if now and mine and now != mine:
            raise OSError(errno.ESTALE, "another run has begun there, so nothing is written", str(checkpoints.folder))


def label_of(checkpoints: Checkpoints, step: int, metrics: Mapping[str, float], kind: Kind) -> dict[str, Any]:
    """What a keeper's child, which has none of the run's objects, needs to write a state: the manifest, and how to keep
    it. A rank calls this."""
    more = {"folder": str(checkpoints.folder), "run_id": checkpoints.provenance.run_id, "keep": checkpoints.keep}
    more |= {"keep_best": checkpoints.keep_best, "verify_every": checkpoints.verify_every}
    return asdict(checkpoints.manifest(step, metrics, kind)) | more


def checkpoints_of(label: Mapping[str, Any]) -> Checkpoints:
    """The folder that :func:`label_of` has described."""
    it = manifest_of(dict(label))
    provenance = Provenance(it.best_by, it.fingerprint, it.bits_void_from, label["run_id"])
    return Checkpoints(
        Path(label["folder"]), label["keep"], provenance, label["keep_best"], it.keep_every, label["verify_every"]
    )


def known_step(checkpoints: Checkpoints) -> int | str:
    """The newest step, for a message about an error of the disk: "?" if its folder cannot be read either."""
    try:
        return checkpoints.newest_step()
    except OSError:
        return "?"

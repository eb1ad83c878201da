"""What torch.compile has made for a run, kept with the run, so that its next start calls no compiler.

While the run is at work, inductor's files are in a folder of this node, because a compiler on a shared file system is
slow. They are packed into the run directory, from where a start on any node of the same kind takes them. torch's own
`torch.compiler.save_cache_artifacts` is not enough: it leaves the libraries that g++ has made out.

These files are code that will be run. So only this run's own are taken, only if they belong to this user and are open
to nobody else, and only if they are, by their sha256, what was written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from .errors import Refusal
from .files import write_atomically

log = logging.getLogger(__name__)

FOLDER = "compiled"
"""In the run directory: KIND.zip and KIND.json, for each kind of node."""

KIND = ("architecture", "cpu_capability", "device_model", "torch", "torch_build", "python", "compiler")
"""Parts of a fingerprint that code in machine language is for. inductor tells all else apart by itself."""

TEMPORARY = re.compile(r"^locks/|(^|/)tmp\.pid_|\.tmp$")
"""Names of files that are of no use afterwards: inductor's locks, and what it or Triton is writing."""

ASKED = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
"""What the user has set; torch sets it for itself as soon as dynamo is imported."""

OURS = 0o700
"""Nobody else may write or read."""


class CompiledCode:
    """The compiled code of one run, as one node has it. Sets where inductor of this process keeps its files.

    Args:
        run_dir: the run directory.
        facts: a fingerprint, with those of `compilation.facts`.

    Raises:
        Refusal: there is no folder that is this user's alone.
    """

    def __init__(self, run_dir: Path, facts: Mapping[str, str]) -> None:
        told = [*(facts.get(part, "") for part in KIND), _instructions()]
        kind = f"{platform.machine()}-{_digest(json.dumps(told).encode())[:16]}"
        self._zip, self._note = (run_dir / FOLDER / f"{kind}.{end}" for end in ("zip", "json"))
        self.folder = _private_folder() / f"{_digest(bytes(run_dir.resolve()))[:16]}-{kind}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        self._packed: set[str] = set()

    def unpack(self, begins: bool) -> str:
        """Make this node's folder what the run has kept. For one process of a node, before any compiles.

        What a killed attempt has left in the folder goes: a library that was being linked then is a torso.

        Args:
            begins: the run does; what is in its folder is another one's.

        Returns:
            Why something that was kept is not used, in a line; empty if all is well.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=OURS, parents=True)
        if begins or not self._note.exists():
            return ""
        try:
            note = json.loads(_read_own(self._note))
            content = _read_own(self._zip)
            if _digest(content) != note["sha256"]:
                raise ValueError("is not what was written")
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                archive.extractall(self.folder)
                self._packed = set(archive.namelist())
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as why:
            return f"{self._zip}: {why}: it is not used, and the model is compiled again"
        return ""

    def pack(self) -> None:
        """Keep what has been made so far in the run directory. For one process of a node; what others of it are making
        just now is left for the next time.

        An error of the disk costs a compilation, and so is only reported.
        """
        found = {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()}
        files = {name: path for name, path in sorted(found.items()) if not TEMPORARY.search(name)}
        if files.keys() <= self._packed:
            return
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, path in files.items():
                with contextlib.suppress(FileNotFoundError), self._whole(path) as whole:
                    if whole:
                        archive.write(path, name)
            written = set(archive.namelist())
        content = packed.getvalue()
        try:
            self._zip.parent.mkdir(mode=OURS, exist_ok=True)
            _write_own(self._zip, content)
            note = {"sha256": _digest(content), "files": len(written), "bytes": len(content)}
            _write_own(self._note, json.dumps(note, indent=2).encode() + b"\n")
            self._packed = written
        except OSError as error:
            log.warning("%s: %s: the next start compiles again", self._zip, error)

    def clear(self) -> None:
        """The run is finished: leave nothing on this node."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _whole(self, path: Path) -> Iterator[bool]:
        """Whether a file is finished, and will be while the context lasts. The linker writes libraries under their own
        names, while inductor holds a lock; all other files come into being in one piece."""
        if path.suffix != ".so":
            yield True
            return
        lock = self.folder / "locks" / f"{path.name.partition('.')[0]}.lock"
        lock.parent.mkdir(exist_ok=True)
        with lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def _private_folder() -> Path:
    """A folder for temporary files, of this user's and nobody else's: another user might put code into it."""
    parent = Path(ASKED or tempfile.gettempdir())
    folder = parent / f"evenkeel-{os.geteuid()}"
    try:
        folder.mkdir(mode=OURS, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise Refusal(f"--compile: {folder}: {error.strerror}; set TMPDIR to a folder that you may write to") from None
    if not stat.S_ISDIR(found.st_mode) or not _is_ours(found):
        raise Refusal(
            f"--compile: {folder}: others may write there, and code in it would be run; remove it, or set TMPDIR to a "
            "folder of your own"
        )
    return folder


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _read_own(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not _is_ours(os.fstat(descriptor)):
            raise PermissionError("it belongs to another user, or is open to others")
        return file.read()


def _write_own(path: Path, content: bytes) -> None:
    def write(file: IO[bytes]) -> None:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)

    write_atomically(path, write)


def _instructions() -> str:
    """What this CPU can do, for which g++ compiles."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^(flags|Features)\s*:(.*)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return " ".join(sorted(found[2].split())) if found else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""Compiled code of torch.compile, stored in the run directory, so that the next start calls no compiler.

inductor works in a folder of this node, because a compiler on a shared file system is slow; its files are packed into
the run directory, and a start on any node of the same kind unpacks them. torch's own
`torch.compiler.save_cache_artifacts` leaves out the libraries that g++ has made.

These files are code that will be run: they are used only if they belong to this user and no other user can open them.
"""

from __future__ import annotations

import contextlib
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

from ..common.errors import Refusal
from ..common.files import try_lock, write_atomically
from .fingerprint import short_digest

log = logging.getLogger(__name__)

KIND = ("architecture", "cpu_capability", "device_model", "torch", "torch_build", "python", "compiler")
"""Parts of a fingerprint that machine code depends on. inductor itself distinguishes everything else."""

TEMPORARY = re.compile(r"^locks/|(^|/)tmp\.pid_|\.tmp$")
"""Names of files to leave out: inductor's locks, and files that it or Triton is writing."""

LARGEST = 2**32
"""Maximum bytes of all unpacked files. The code of a large model has some hundred million."""

ASKED = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
"""The user's setting; torch sets the variable itself as soon as dynamo is imported."""


class CompiledCode:
    """The compiled code of one run on this node. Sets where inductor of this process keeps its files.

    Args:
        run_dir: the run directory; in it, compiled/KIND.zip is for each kind of node.
        facts: a fingerprint, with those of `compilation.facts`.

    Raises:
        Refusal: there is no folder that is this user's alone.
    """

    def __init__(self, run_dir: Path, facts: Mapping[str, str]) -> None:
        info = Path("/proc/cpuinfo")  # the features of this CPU, for which g++ compiles
        found = re.search(r"(?m)^(flags|Features)\s*:(.*)$", info.read_text() if info.exists() else "")
        parts = [*(facts.get(part, "") for part in KIND), " ".join(sorted(found[2].split())) if found else ""]
        kind = f"{platform.machine()}-{short_digest(json.dumps(parts).encode())}"
        self.archive = run_dir / "compiled" / f"{kind}.zip"
        self.folder = _private_folder() / f"{short_digest(bytes(run_dir.resolve()))}-{kind}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        self._packed: set[str] = set()

    def unpack(self, starts_over: bool) -> str:
        """Replace this node's folder by what the run has stored. For one process of a node, before any compiles.

        Files of a killed attempt are deleted: a library that was being linked then is incomplete.

        Args:
            starts_over: the run does; its folder has another run's code.

        Returns:
            Why stored code is not used, in a line; empty if all is well.
        """
        try:
            self._begin_anew()
            if starts_over or not self.archive.exists():
                return ""
            with os.fdopen(os.open(self.archive, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                if not _is_ours(os.fstat(file.fileno())):
                    raise PermissionError("it belongs to another user, or is open to others")
                with zipfile.ZipFile(file) as archive:
                    if (size := sum(it.file_size for it in archive.infolist())) > LARGEST:
                        raise zipfile.BadZipFile(f"its files have {size:,} bytes; at most {LARGEST:,} are read")
                    if damaged := archive.testzip():
                        raise zipfile.BadZipFile(f"Bad CRC-32 for file {damaged!r}")
                    archive.extractall(self.folder)
                    self._packed = set(archive.namelist())
        except Exception as why:  # zipfile raises nearly everything: it is encrypted, of an unknown method, ...
            with contextlib.suppress(OSError):
                self._begin_anew()  # it might have an incomplete library
            return f"{self.archive}: {why or type(why).__name__}: it is not used, and the model is compiled again"
        return ""

    def _begin_anew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def pack(self) -> None:
        """Store what has been compiled so far in the run directory. For one process of a node.

        Files that others are writing now are left for the next time. A disk error only costs a compilation, so it is
        only logged.
        """
        found = {str(path.relative_to(self.folder)): path for path in self.folder.rglob("*") if path.is_file()}
        files = {name: path for name, path in sorted(found.items()) if not TEMPORARY.search(name)}
        if files.keys() <= self._packed:
            return

        def write(file: IO[bytes]) -> None:
            os.fchmod(file.fileno(), 0o600)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
                for name, path in files.items():
                    with contextlib.suppress(FileNotFoundError), self._whole(path) as whole:
                        if whole:
                            archive.write(path, name)
                self._packed = set(archive.namelist())

        try:
            self.archive.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self.archive, write)
        except OSError as error:
            self._packed = set()
            log.warning("%s: %s: the next start compiles again", self.archive, error)

    def clear(self) -> None:
        """The run is finished: leave nothing on this node."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _whole(self, path: Path) -> Iterator[bool]:
        """Whether a file is finished, and will be while the context lasts. The linker writes libraries under their own
        names, while inductor has a lock; all other files appear whole."""
        if path.suffix != ".so":
            yield True
            return
        lock_file = self.folder / "locks" / f"{path.name.partition('.')[0]}.lock"
        lock_file.parent.mkdir(exist_ok=True)
        with lock_file.open("ab") as file:
            yield try_lock(file, until=0)


def _private_folder() -> Path:
    """A folder for temporary files that only this user can write: another user might put code into it."""
    folder = Path(ASKED or tempfile.gettempdir()) / f"evenkeel-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise Refusal(f"--compile: {folder}: {error.strerror}; set TMPDIR to a folder that you may write to") from None
    if not stat.S_ISDIR(found.st_mode) or not _is_ours(found):
        raise Refusal(
            f"--compile: {folder}: others may write there, and its code would be run; remove it, or set TMPDIR to "
            "a folder of your own"
        )
    return folder


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077

"""Files from the network: fetched once by one process, whole or not there, and one line where there is no network."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import socket
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import Refusal

SILENCE = 60.0
"""Seconds without a byte after which a server is given up."""

LOCK, FAILURE, PARTIAL = ".evenkeel-lock", ".evenkeel-download-failed", ".evenkeel-partial"
"""What is kept in a folder of downloads beside them. FAILURE is followed by what failed, PARTIAL by who downloads."""

FAILURES = (OSError, RuntimeError, EOFError, zlib.error, tarfile.TarError, http.client.HTTPException)
"""What torchvision and the standard library raise where a download does not come, or not whole."""


def fetch(folder: Path, whole: Callable[[], bool], download: Callable[[Path], None], what: str, remedy: str) -> None:
    """Have files in a folder. Of several processes that ask at once one downloads, and the others wait for it.

    What is downloaded goes to a folder of its own first and is moved when it is complete, so a process that is killed
    leaves nothing that the next one takes for whole. Those that waited for a download that failed do not try again.

    Args:
        folder: where they are to be. The lock is a file in it, by `fcntl`, which NFS knows as well.
        whole: whether they are all there.
        download: gets a folder and puts them there, as they are to lie in the other one, or raises one of FAILURES.
        what: is downloaded, to say so.
        remedy: which files to put where by hand.

    Raises:
        Refusal: they are neither there nor to be had.
    """
    if whole():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        asked = _now(folder)
        with _alone_in(folder, what):
            if whole():
                return
            note = failure_note(folder, what)
            if note.exists() and note.stat().st_mtime_ns >= asked:
                raise Refusal(note.read_text())
            try:
                _download(folder, download, what)
            except FAILURES as error:
                note.write_text(_explain(what, error, remedy))
                raise
    except FAILURES as error:  # Refusal is none of them
        raise Refusal(_explain(what, error, remedy)) from None


def failure_note(folder: Path, what: str) -> Path:
    """Where those that wait for a download find why it has failed. Another job may want something else there."""
    return folder / f"{FAILURE}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def _now(folder: Path) -> int:
    """The present time in nanoseconds by the clock that dates the files of a folder, which may be a file server's."""
    mark = folder / f".evenkeel-now-{socket.gethostname()}-{os.getpid()}"
    try:
        mark.write_bytes(b"\n")
        return mark.stat().st_mtime_ns
    finally:
        mark.unlink(missing_ok=True)


def _explain(what: str, error: BaseException, remedy: str) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{what}: is not here and cannot be downloaded ({reason[:300]}); {remedy}"


@contextlib.contextmanager
def _alone_in(folder: Path, what: str) -> Iterator[None]:
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{what}: waiting for another process that downloads it")
            fcntl.lockf(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: each downloads for itself, and the last to move its files wins
            pass
        yield


def _download(folder: Path, download: Callable[[Path], None], what: str) -> None:
    partial = folder / f"{PARTIAL}-{socket.gethostname()}-{os.getpid()}"
    for old in folder.glob(f"{PARTIAL}-{socket.gethostname()}-*"):
        if not Path("/proc", old.name.rpartition("-")[2]).exists():  # of a process that was killed
            shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    _say(f"{what}: downloading to {folder}")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE)
    try:
        download(partial)
        for source in sorted(partial.rglob("*")):
            if source.is_file() and not source.is_symlink():  # a link is to what was there before
                _move(source, folder / source.relative_to(partial))
    finally:
        socket.setdefaulttimeout(before)
        shutil.rmtree(partial, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Give a complete file its name, when it has come to the disk."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


def _say(text: str) -> None:
    print(f"evenkeel: {text}", file=sys.stderr, flush=True)


def fetch_torchvision_data(dataset: Any, name: str, root: Path) -> None:
    """The files of one of torchvision's MNIST or CIFAR data sets, checked by torchvision's MD5 sums.

    Archives that somebody has put there, whole by those sums, are unpacked and not downloaded.

    Args:
        dataset: the class in `torchvision.datasets`.
        name: in --dataset.
        root: --data-dir.

    Raises:
        Refusal: they are neither there nor to be had.
    """
    is_mnist = hasattr(dataset, "resources")
    inside = Path(dataset.__name__, "raw") if is_mnist else Path(dataset.base_folder)
    archives = dict(dataset.resources) if is_mnist else {dataset.filename: dataset.tgz_md5}
    unpacked = [archive.removesuffix(".gz") for archive in archives]

    def whole() -> bool:
        if is_mnist:
            return all((root / inside / file).is_file() for file in unpacked)
        # torchvision reads these by pickle, which may run code: never without this check, which it makes again
        members = [*dataset.train_list, *dataset.test_list, [dataset.meta["filename"], dataset.meta["md5"]]]
        return all(_has_md5(root / inside / file, md5) for file, md5 in members)

    def download(partial: Path) -> None:
        target = partial / inside if is_mnist else partial
        target.mkdir(parents=True, exist_ok=True)
        for archive, md5 in archives.items():
            for place in (root / inside / archive, root / archive):
                if not place.is_file() or (target / archive).exists():
                    continue
                if _has_md5(place, md5):
                    (target / archive).symlink_to(place.resolve())
                else:
                    _say(f"{place}: is not the published file by its MD5 sum, and left alone")
        dataset(partial, train=True, download=True)

    if is_mnist:
        remedy = f"put {', '.join(unpacked)} into {root / inside}, as they are or with .gz"
    else:
        remedy = f"put {dataset.filename} into {root}, or what is in it into {root / inside}"
    fetch(root, whole, download, f"--dataset {name}", f"{remedy}, or name another folder by --data-dir")


def fetch_weights(weights: Any, name: str) -> Path:
    """The file of published weights, in torch's cache, where torchvision looks for it; checked by its SHA-256.

    Args:
        weights: a member of torchvision's `WeightsEnum`.
        name: in --model.

    Raises:
        Refusal: it is neither there nor to be had.
    """
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = weights.url.rpartition("/")[2]
    digest = re.search(r"-([0-9a-f]{8,})\.", file)

    def download(partial: Path) -> None:
        if digest is None:
            raise RuntimeError(f"{file} has no checksum in its name")
        torch.hub.download_url_to_file(weights.url, str(partial / file), digest[1], progress=False)

    remedy = f"put {file} into {folder}; TORCH_HOME names another place"
    fetch(folder, (folder / file).is_file, download, f"--pretrained --model {name}", remedy)
    return folder / str(file)


def _has_md5(path: Path, md5: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        digest = hashlib.md5(usedforsecurity=False)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == md5

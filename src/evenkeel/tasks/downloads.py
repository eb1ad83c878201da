"""Download data sets and pretrained weights: one process does it and the others wait; a file is whole or absent."""

from __future__ import annotations

import fcntl
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..common.display import say
from ..common.errors import Refusal


def fetch(lock: Path, whole: Callable[[], bool], download: Callable[[], object], what: str, remedy: str) -> None:
    """Download files unless they exist. One of several processes does it; if it fails, the waiting ones fail too.

    Args:
        lock: a file beside them, locked by `fcntl`, which works on NFS. It holds why the last download failed.
        whole: whether the files are all there.
        download: puts them there, each under its name only when it is complete.
        what, remedy: begin and end of the refusal: the options, and which files to put where by hand.
    """
    timeout = socket.getdefaulttimeout()
    try:
        if whole():
            return
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a+") as failure:
            try:
                fcntl.lockf(failure, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"evenkeel: {what}: waiting for another process to download it", to_stderr=True)
                fcntl.lockf(failure, fcntl.LOCK_EX)
                failure.seek(0)
                if reason := failure.read():
                    raise RuntimeError(reason) from None
            if whole():
                return
            failure.truncate(0)
            say(f"evenkeel: {what}: downloading to {lock.parent}", to_stderr=True)
            socket.setdefaulttimeout(60)  # seconds without a byte
            try:
                download()
            except Exception as error:
                failure.write(str(error) or type(error).__name__)
                raise
    except Exception as error:  # torchvision, torch.hub and the standard library raise many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Refusal(f"{what}: not found, and the download failed ({reason[:300]}); {remedy}") from None
    finally:
        socket.setdefaulttimeout(timeout)


def fetch_dataset(dataset: Any, name: str, root: Path) -> None:
    """Download the files of `dataset`, torchvision's class, to --data-dir, checked by their MD5 sums.

    Published archives that lie there already are unpacked and not downloaded.
    """
    from torchvision.datasets.utils import check_integrity

    is_mnist = hasattr(dataset, "resources")
    folder = Path(dataset.__name__, "raw") if is_mnist else Path(dataset.base_folder)
    if is_mnist:
        archives = dict(dataset.resources)
        files = [(archive.removesuffix(".gz"), None) for archive in archives]
        remedy = f"put {', '.join(file for file, _ in files)} into {root / folder}, as they are or with .gz"
    else:  # pickles, which can run code: they are only read with these sums, which torchvision checks again
        archives = {dataset.filename: dataset.tgz_md5}
        files = [*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])]
        remedy = f"put {dataset.filename} into {root}, or its files into {root / folder}"
    partial = root / f".evenkeel-{name}"

    def download() -> None:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            archives_in = partial / folder if is_mnist else partial
            archives_in.mkdir(parents=True)
            for archive, md5 in archives.items():
                if found := [path for path in (root / folder / archive, root / archive) if check_integrity(path, md5)]:
                    (archives_in / archive).symlink_to(found[0].resolve())
            dataset(partial, download=True)
            (root / folder).mkdir(parents=True, exist_ok=True)
            for file, _ in files:
                (partial / folder / file).replace(root / folder / file)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def whole() -> bool:
        return all(check_integrity(root / folder / file, md5) for file, md5 in files)

    what = f"--dataset {name}"
    fetch(root / f".evenkeel-{name}.lock", whole, download, what, f"{remedy}, or name another folder by --data-dir")


def fetch_weights(weights: Any, name: str) -> Path:
    """Download torchvision's pretrained weights of network `name` to torch's cache, checked by their SHA-256."""
    file = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    digest = re.search(r"-([0-9a-f]{8,})\.", file.name)
    assert digest is not None, file  # true of all weights of torchvision

    def download() -> None:
        torch.hub.download_url_to_file(weights.url, str(file), digest[1], progress=False)

    remedy = f"put {file.name} into {file.parent}; TORCH_HOME sets another folder"
    fetch(file.with_name(f".evenkeel-{file.name}.lock"), file.is_file, download, f"--pretrained --model {name}", remedy)
    return file

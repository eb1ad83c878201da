"""A run in an object store, by fsspec.

    URL/lease.json                                       which job writes here (lease.py)
    URL/config.toml, status.json, metrics.jsonl, ...     the run's own files
    URL/checkpoints/step-00000042/state.pt.1f0c9a2b77e3  a file, with the beginning of its sha256
                                  manifest.json          the checkpoint's own manifest, written last

A step with a manifest has been uploaded completely. Names with a sha256 let two nodes upload the same step at once.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from ..common.display import say
from ..common.errors import Refusal
from ..common.files import temporary_name, write_atomically
from ..run.manifest import MANIFEST, Manifest, read_manifest, step_of, verify
from ..run.state_files import Damaged, WrittenFile, folder_of

FILES = ("config.toml", "metrics.jsonl", "ranks.jsonl", "summary.json", "model.pt", "status.json")
"""Of the run's folder: what the next start, `report` and `predict` need, and the result. The status is sent last: if it
says "finished", the others are there."""

TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}  # botocore's take minutes


class Store:
    """A run at a URL. Methods raise what fsspec raises, of any type, if the store is away.

    Args:
        url: any that fsspec knows; refused if it cannot be meant.
        copies: a folder for copies of the manifests there, in which `Checkpoints` finds them.
    """

    def __init__(self, url: str, copies: Path) -> None:
        protocol, mark, _ = url.partition("://")
        if re.search("://[^/]*:[^/]*@", url):
            raise Refusal("--mirror: leave the password out of the URL; fsspec reads it from its own configuration")
        if not mark or protocol == "memory":
            raise Refusal(f"--mirror {url}: give a URL that other processes can read, such as s3://bucket/run")
        options: Any = {"s3": {"config_kwargs": TIMEOUTS}, "file": {"auto_mkdir": True}}.get(protocol, {})
        try:
            self.fs, root = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise Refusal(f"--mirror {url}: {error} (s3 needs: pip install s3fs)") from None
        self.url, self.copies, self._root = url, copies, root.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """An object's content; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return bytes(self.fs.cat_file(f"{self._root}/{name}"))
        return None

    def write(self, name: str, content: bytes | Path) -> None:
        """Write an object: bytes, or a file's."""
        if isinstance(content, bytes):
            self.fs.pipe_file(f"{self._root}/{name}", content)
        else:
            self.fs.put_file(str(content), f"{self._root}/{name}")

    def remove(self, name: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self._root}/{name}")

    def put(self, path: Path) -> None:
        """Upload a checkpoint: its files, then its manifest."""
        content = (path / MANIFEST).read_bytes()
        for name, written in read_manifest(path).files.items():
            self.write(_object(path.name, name, written), path / name)
        self.write(f"checkpoints/{path.name}/{MANIFEST}", content)

    def manifests(self) -> dict[int, Manifest]:
        """Those of all steps that have been uploaded completely, by step; `copies` gets them."""
        shutil.rmtree(self.copies, ignore_errors=True)
        names = [name for name in self.fs.find(f"{self._root}/checkpoints") if name.endswith(f"/{MANIFEST}")]
        names, found = ["/".join(name.split("/")[-3:]) for name in names], {}
        with ThreadPoolExecutor(8) as pool:  # not `cat`, for which "lr[0.1]" is a pattern
            contents = [*pool.map(self.read, names)]
        for name, content in zip(names, contents, strict=True):
            if content is None:  # it has just been deleted
                continue
            (path := self.copies / name.split("/")[-2]).mkdir(parents=True)
            (path / MANIFEST).write_bytes(content)
            try:
                found[step_of(path)] = read_manifest(path)
            except Damaged:  # cut short, or set aside
                shutil.rmtree(path)
        return found

    def fetch(self, step: int, folder: Path, check: bool = True) -> None:
        """Copy a checkpoint into a folder, under a hidden name until it is whole. With `check` raises Damaged."""
        name = folder_of(step)
        path = temporary_name(folder / name) / name
        path.mkdir(parents=True)
        try:
            (path / MANIFEST).write_bytes(self.read(f"checkpoints/{name}/{MANIFEST}") or b"")
            for file, written in read_manifest(path).files.items():
                with contextlib.suppress(FileNotFoundError):  # it is missing then
                    self.fs.get_file(f"{self._root}/{_object(name, file, written)}", str(path / file))
            if check:
                verify(path)
            try:
                path.replace(folder / name)
            except OSError:  # it is not empty
                if not (folder / name / MANIFEST).exists():  # else another node on this disk was faster
                    raise
        finally:
            shutil.rmtree(path.parent)

    def fetch_newest(self, folder: Path, above: int = 0, set_aside: bool = False) -> int:
        """Fetch the newest whole checkpoint above a step, and return its step; 0: there is none.

        With `set_aside` the manifests of those that arrive damaged twice are renamed, so that they do not count as the
        newest.
        """
        for step in sorted((step for step in self.manifests() if step > above), reverse=True):
            for last in (False, True):  # once it may be the network
                try:
                    self.fetch(step, folder)
                    return step
                except Damaged as damage:
                    what = f"is damaged: {str(damage).partition(': ')[2]}"
                except Exception as error:  # of any type: each kind of store has its own
                    if last:
                        raise
                    what = f"has not arrived: {type(error).__name__}"
                then = "trying the one before" if last else "fetching it again"
                say(f"evenkeel: {self.url}: step {step} {what}; {then}", to_stderr=True)
            if set_aside:
                place = f"{self._root}/checkpoints/{folder_of(step)}"
                self.fs.mv(f"{place}/{MANIFEST}", f"{place}/damaged-{MANIFEST}")
        return 0

    def delete(self, kept: Collection[int]) -> None:
        """Delete what is older than the newest of some steps and is none of them, manifests first."""
        names = [name[len(self._root) + 1 :] for name in self.fs.find(f"{self._root}/checkpoints")]
        for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):
            found = re.match(r"checkpoints/step-(\d+)/", name)
            if found and int(found[1]) < max(kept) and int(found[1]) not in kept:
                self.remove(name)

    def fetch_files(self, run_dir: Path) -> None:
        """Copy the run's own files but model.pt into its folder, over those there."""
        for name in FILES[:-1]:
            if (content := self.read(name)) is not None:
                write_atomically(run_dir / name, methodcaller("write", content), private=name == FILES[0])


def _object(step: str, name: str, written: WrittenFile) -> str:
    return f"checkpoints/{step}/{name}.{written.sha256[:12]}"

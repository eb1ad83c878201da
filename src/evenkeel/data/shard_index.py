"""The index of a folder of shards: the samples of each file, their offsets, and the file's checksum.

`shards.index.json` is the manifest. The offsets are in a table beside it, `shards.index.DIGEST.npy`, one row per
sample, which is mapped into memory. The manifest names its table, so the two always match.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ..common.errors import Refusal
from ..common.files import alike, read_json, sha256_of, write_atomically, write_json
from ..common.naming import listed
from .shard_formats import SCANS, Table, names_of, table_of, wrong_field

MANIFEST = "shards.index.json"
VERSION = 1

FORMATS = {".tar": "tar", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".mds": "mds"}
"""Format by the end of a file's name."""
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")

TABLE = re.compile(r"shards\.index\.[0-9a-f]{16}\.npy")
"""Names of tables."""

EXAMPLE: dict[str, Any] = {
    "version": 1, "format": "", "table": "",
    "shards": [{"name": "", "samples": 0, "bytes": 0, "sha256": "", "groups": [0]}],
}  # fmt: skip
"""The content of a manifest, except its fields."""

Track = Callable[[Iterable[Any], int], Iterable[Any]]
"""(things, their number) -> the same things; shows the progress."""


@dataclass(frozen=True)
class Shard:
    """A file of samples."""

    name: str
    samples: int
    bytes: int
    sha256: str
    groups: list[int]
    """Rows of each row group, of a Parquet file."""


@dataclass(frozen=True)
class Index:
    """The content of the manifest."""

    version: int
    format: str
    fields: list[Any]
    """tar: the extensions; Parquet: the columns; MDS: [name, encoding, size or null] of each column."""
    table: str
    """The name of its file; empty for Parquet, whose footers have the offsets."""
    shards: list[Shard]

    @property
    def samples(self) -> int:
        """Of all shards."""
        return sum(shard.samples for shard in self.shards)


def read_index(folder: Path) -> Index:
    """Read the index of a folder, and check that its files exist and have the recorded sizes.

    Raises:
        Refusal: there is no index, or it does not fit the files.
    """
    again = f"run `python -m evenkeel data index {folder}`"
    kind, paths = _find(folder)
    try:
        value = read_json(folder / MANIFEST)
        if not value:
            raise Refusal(f"{folder}: has no index of its shards; {again}")
        if value["version"] != VERSION:
            raise Refusal(f"{folder / MANIFEST}: has version {value['version']!r:.20}, but this is {VERSION}; {again}")
        index = _index_of(value)
        if index.format != kind:
            raise ValueError(f"it is of {index.format!r:.20} files, but the folder has {kind}")
        _check_table(folder, index)
    except Refusal:
        raise
    except Exception as error:  # NumPy raises errors of any type for a damaged table
        raise Refusal(f"{folder / MANIFEST}: cannot be read: {_told(error)}; {again}") from None
    sizes = {path.name: path.stat().st_size for path in paths}
    for shard in index.shards:
        if (size := sizes.pop(shard.name, None)) != shard.bytes:
            found = "is gone" if size is None else f"has {size} bytes"
            path = folder / shard.name
            raise Refusal(f"{path}: {found}, but the index says {shard.bytes}; restore it, or {again}")
    if sizes:
        raise Refusal(f"{folder}: {listed(sorted(sizes))} is not in its index; {again}, or move it elsewhere")
    return index


def _index_of(value: dict[str, Any]) -> Index:
    """The index in a manifest.

    Raises:
        ValueError: it has something that `write_index` does not write. `Index` may raise other errors.
    """
    for name, example in EXAMPLE.items():
        if not alike(value.get(name), example):
            raise ValueError(f"its {name} is {value.get(name)!r:.60}")
    index = Index(**value | {"shards": [Shard(**shard) for shard in value["shards"]]})
    parquet = index.format == "parquet"
    if wrong := wrong_field(index.format, index.fields):
        raise ValueError(wrong)
    for shard in index.shards:
        if shard.samples < 1 or sum(shard.groups) != shard.samples * parquet:
            raise ValueError(f"for {shard.name} it says {shard.samples} samples, in row groups {sum(shard.groups)}")
    if index.samples > sys.maxsize or bool(index.table) == parquet:
        raise ValueError(f"it says {index.samples} samples, with the table {index.table!r:.60}")
    return index


def _check_table(folder: Path, index: Index) -> None:
    """Check that the table has these samples and fields, with rows as `table_of` makes them."""
    if not index.table:
        return
    if not TABLE.fullmatch(index.table):  # nothing outside the folder
        raise ValueError(f"its table is {index.table!r:.60}")
    table = mapped(folder / index.table)
    of_files, fields = index.format in ("jsonl", "mds"), len(index.fields)
    key = table.dtype["key"].itemsize if index.format == "tar" else 0
    right = table_of(np.zeros((0, 1 if of_files else fields, 2), np.int64), key)
    if table.dtype != right.dtype or table.shape != (index.samples,):
        raise ValueError(f"{index.table} does not have {index.samples} samples of {fields} fields")


def mapped(path: Path) -> Table:
    """A table, mapped into memory. For a damaged file NumPy raises errors of any type."""
    table: Table = np.lib.format.open_memmap(path, mode="r")
    return table


def write_index(folder: Path, track: Track = lambda things, _: things) -> Index:
    """Read all shards of a folder and write the index. Files that are not shards are ignored.

    Raises:
        Refusal: there are no shards, or one cannot be used. Nothing has been written then.
    """
    kind, paths = _find(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            found = list(track(pool.map(lambda path: _scan(kind, path), paths), len(paths)))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    first, fields = paths[0].name, found[0][1]
    by_content: dict[str, str] = {}
    for shard, theirs, _ in found:
        if theirs != fields:
            raise Refusal(
                f"{folder / shard.name}: its samples have {names_of(theirs)}, but those of {first} {names_of(fields)}; "
                "samples with other members belong in another folder"
            )
        if (other := by_content.setdefault(shard.sha256, shard.name)) != shard.name:
            raise Refusal(f"{folder / shard.name}: is a copy of {other}, so samples would be used twice; remove one")
    tables = [table for _, _, table in found if table is not None]
    content = BytesIO()
    if tables:
        np.save(content, np.concatenate(tables))
    name = table_name(hashlib.sha256(content.getbuffer()).hexdigest()) if tables else ""
    index = Index(VERSION, kind, fields, name, [it for it, *_ in found])
    try:
        if tables:
            write_atomically(folder / index.table, lambda file: file.write(content.getbuffer()))
        write_json(folder / MANIFEST, asdict(index))
        for path in folder.glob("shards.index.*.npy"):
            if path.name != index.table:
                path.unlink()
    except OSError as error:
        raise Refusal(f"{folder}: the index cannot be written: {error.strerror or error}; fix that") from None
    return index


def table_is_whole(folder: Path, index: Index) -> bool:
    """Whether the table's content still matches its name."""
    return not index.table or table_name(sha256_of(folder / index.table)) == index.table


def table_name(digest: str) -> str:
    """The name of a table with this SHA-256."""
    return f"shards.index.{digest[:16]}.npy"


def _find(folder: Path) -> tuple[str, list[Path]]:
    """The format of a folder's shards and their files, by name."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except OSError as error:
        raise Refusal(f"{folder}: {error.strerror}; name a folder of shards") from None
    for path in files:
        if path.suffix in COMPRESSED and (path.suffix == ".tgz" or Path(path.stem).suffix in FORMATS):
            raise Refusal(f"{path}: is compressed, so a sample can only be read after all previous ones; unpack it")
    by_format: dict[str, list[Path]] = {}
    for path in files:
        if path.suffix in FORMATS:
            by_format.setdefault(FORMATS[path.suffix], []).append(path)
    if not by_format:
        raise Refusal(f"{folder}: has no shards; name a folder with {', '.join(FORMATS)} files")
    if len(by_format) > 1:
        raise Refusal(f"{folder}: has shards of several formats, {', '.join(by_format)}; give each its own folder")
    return next(iter(by_format.items()))


Scanned = tuple[Shard, list[Any], "Table | None"]
"""A shard, the fields of its samples and their offsets."""


def _scan(kind: str, path: Path) -> Scanned:
    try:
        size, digest = path.stat().st_size, sha256_of(path)
        fields, found = SCANS[kind](path)
        if path.stat().st_size != size:
            raise Refusal(f"{path}: is still being written; index the folder when it is complete")
    except Refusal:
        raise
    except Exception as error:  # readers of formats raise errors of any type for a damaged file
        raise Refusal(f"{path}: is truncated or damaged: {_told(error)}; create it again or remove it") from None
    if wrong := wrong_field(kind, fields):
        raise Refusal(f"{path}: {wrong}; create it again with other columns")
    groups = found if kind == "parquet" else []
    samples = sum(groups) if kind == "parquet" else len(found)
    if not samples:
        raise Refusal(f"{path}: has no samples; create it again or remove it")
    return Shard(path.name, samples, size, digest, groups), fields, None if kind == "parquet" else found


def _told(error: Exception) -> str:
    """The message of an error, with its type unless it is a ValueError or an OSError."""
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"

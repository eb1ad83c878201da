"""The index of a folder of shards: which samples each file has, where they lie in it, and its checksum.

`shards.index.json` is the manifest. Where samples lie is in a table beside it, `shards.index.DIGEST.npy`, one row a
sample, which is mapped into memory. The manifest names its table, so the two always belong together.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.errors import Refusal
from ..common.files import read_json, sha256_of, write_atomically, write_json
from ..common.naming import listed

MANIFEST = "shards.index.json"
VERSION = 1

FORMATS = {".tar": "tar", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".mds": "mds"}
"""Format by the end of a file's name."""
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")

MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
"""Key and extension in the name of a tar's member, as WebDataset splits it."""
BLANK = 64
"""Lines of JSON of at most so many bytes are looked at: blank ones do not count."""
META = re.compile(r"__[^/]*__($|/)")
"""Members that WebDataset leaves out."""

Table = NDArray[Any]
"""A row a sample: "key" (tar only), and "offset" and "size" of each field, [number of fields], in bytes."""
Track = Callable[[Iterable[Any], int], Iterable[Any]]
"""(things, how many) -> the same things; shows how far it is."""


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
    """What the manifest holds."""

    version: int
    format: str
    fields: list[Any]
    """tar: the extensions; Parquet: the columns; MDS: [name, encoding, size or null] of each column."""
    table: str
    """The name of its file; empty for Parquet, whose footers say where rows are."""
    shards: list[Shard]

    @property
    def samples(self) -> int:
        """Of all shards."""
        return sum(shard.samples for shard in self.shards)


def read_index(folder: Path) -> Index:
    """Read the index of a folder, and check that its files are there and as large as they were.

    Raises:
        Refusal: there is no index, or it does not fit the files.
    """
    again = f"run `python -m evenkeel data index {folder}`"
    try:
        value = read_json(folder / MANIFEST)
        if not value:
            raise Refusal(f"{folder}: has no index of its shards; {again}")
        if value["version"] != VERSION:
            raise Refusal(f"{folder / MANIFEST}: is of version {value['version']}, and this is {VERSION}; {again}")
        index = Index(**value | {"shards": [Shard(**shard) for shard in value["shards"]]})
        if index.table and len(np.load(folder / index.table, mmap_mode="r")) != index.samples:
            raise ValueError(f"{index.table} is not of {index.samples} samples")
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise Refusal(f"{folder / MANIFEST}: cannot be read: {error}; {again}") from None
    for shard in index.shards:
        path = folder / shard.name
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            found = "is gone" if size is None else f"has {size} bytes"
            raise Refusal(f"{path}: {found}, where the index says {shard.bytes}; bring it back, or {again}")
    if new := {path.name for path in _find(folder)[1]} - {shard.name for shard in index.shards}:
        raise Refusal(f"{folder}: {listed(sorted(new))} is not in its index; {again}, or move it elsewhere")
    return index


def write_index(folder: Path, track: Track = lambda things, _: things) -> Index:
    """Read all shards of a folder and write the index. Files that are no shards are left alone.

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
                f"{folder / shard.name}: its samples have {_names(theirs)}, and those of {first} {_names(fields)}; "
                "samples with other members belong in another folder"
            )
        if (other := by_content.setdefault(shard.sha256, shard.name)) != shard.name:
            raise Refusal(f"{folder / shard.name}: is a copy of {other}, so that samples would come twice; remove one")
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
        raise Refusal(f"{folder}: the index cannot be written: {error.strerror or error}; mend that") from None
    return index


def table_is_whole(folder: Path, index: Index) -> bool:
    """Whether the table still is what its name says."""
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
            raise Refusal(
                f"{path}: is compressed, and then a sample can only be read after all that come before it; unpack it"
            )
    by_format: dict[str, list[Path]] = {}
    for path in files:
        if path.suffix in FORMATS:
            by_format.setdefault(FORMATS[path.suffix], []).append(path)
    if not by_format:
        raise Refusal(f"{folder}: holds no shards; name a folder with {', '.join(FORMATS)} files in it")
    if len(by_format) > 1:
        raise Refusal(f"{folder}: holds shards of several formats, {', '.join(by_format)}; give each its own folder")
    return next(iter(by_format.items()))


Scanned = tuple[Shard, list[Any], "Table | None"]
"""A shard, the fields of its samples and where these lie."""


def _scan(kind: str, path: Path) -> Scanned:
    scan: Callable[[Path], tuple[list[Any], Any]] = {
        "tar": _scan_tar,
        "jsonl": _scan_lines,
        "parquet": _scan_parquet,
        "mds": _scan_mds,
    }[kind]
    try:
        size, digest = path.stat().st_size, sha256_of(path)
        fields, found = scan(path)
        if path.stat().st_size != size:
            raise Refusal(f"{path}: is still being written; index the folder when it is complete")
    except (OSError, tarfile.TarError, ValueError, LookupError, TypeError, RecursionError, struct.error) as error:
        raise Refusal(f"{path}: is truncated or damaged: {error}; make it again or remove it") from None
    groups = found if kind == "parquet" else []
    samples = sum(groups) if kind == "parquet" else len(found)
    if not samples:
        raise Refusal(f"{path}: has no samples; make it again or remove it")
    return Shard(path.name, samples, size, digest, groups), fields, None if kind == "parquet" else found


def _scan_tar(path: Path) -> tuple[list[str], Table]:
    fields: list[str] = []
    keys: dict[bytes, None] = {}
    places: list[tuple[int, int]] = []
    for key, members in _samples(path):
        fields = fields or sorted(members)
        if missing := set(fields) - members.keys():
            raise Refusal(f"{path}: sample {key} has no {_names(sorted(missing))}, as the samples before it have")
        if more := members.keys() - set(fields):
            raise Refusal(f"{path}: sample {key} has {_names(sorted(more))}, which the samples before it have not")
        if key.encode() in keys:
            raise Refusal(f"{path}: the key {key} comes twice; the members of a sample must follow one another")
        keys[key.encode()] = None
        places += (members[name] for name in fields)
    table = _table(np.array(places, np.int64).reshape(len(keys), len(fields), 2), max(map(len, keys), default=1))
    table["key"] = [*keys]
    return fields, table


def _samples(path: Path) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """(key, extension -> (offset, size)) of each sample of a tar."""
    key, members, end = "", dict[str, tuple[int, int]](), 0
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        while info := tar.next():
            tar.members.clear()  # type: ignore[attr-defined]  # or it would keep them all
            end = info.offset_data + -(-info.size // 512) * 512
            parts = MEMBER.fullmatch(info.name)
            if not parts or META.match(info.name):
                continue
            if info.issym() or info.islnk() or info.issparse():
                kind = "sparse" if info.issparse() else "a link"
                remedy = "without --sparse" if info.issparse() else "with --hard-dereference"
                raise Refusal(f"{path}: {info.name} is {kind}, so its bytes do not stand here; make the tar {remedy}")
            if not info.isreg():
                continue
            name = parts[2].lower()
            if parts[1] != key:
                if members:
                    yield key, members
                key, members = parts[1], {}
            if name in members:
                raise Refusal(f"{path}: sample {key} has two members {name}")
            members[name] = info.offset_data, info.size
        if members:
            yield key, members
        file.seek(end)
        rest = file.read(1024)
        if len(rest) < 1024 or any(rest):
            raise ValueError("it has no end mark")
        while rest := file.read(1 << 20):
            if rest.strip(b"\0"):
                raise ValueError("there is more after its end mark, as if two files had been joined")


def _scan_lines(path: Path) -> tuple[list[str], Table]:
    cuts, start = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            cuts.append(np.flatnonzero(np.frombuffer(part, np.uint8) == ord("\n")) + start + 1)
            start += len(part)
        ends = np.append(np.concatenate(cuts), start)
        places = np.stack([ends[:-1], np.diff(ends)], 1)
        places = places[places[:, 1] > 0]
        short = places[:, 1] <= BLANK
        blank = [not os.pread(file.fileno(), int(size), int(at)).strip() for at, size in places[short].tolist()]
        places = np.delete(places, np.flatnonzero(short)[blank], 0)
        for at, size in (
            places[[0, -1]].tolist() if len(places) else ()
        ):  # a file that was cut off has no whole last line
            if not isinstance(json.loads(os.pread(file.fileno(), size, at)), dict):
                raise ValueError(f"the line at byte {at} is no JSON object")
    return [], _table(places[:, None])


def _scan_parquet(path: Path) -> tuple[list[str], list[int]]:
    footer = parquet(path).ParquetFile(path).metadata
    groups = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    return sorted(footer.schema.to_arrow_schema().names), groups


def parquet(path: Path) -> Any:
    """The module that reads Parquet.

    Raises:
        Refusal: pyarrow is not installed.
    """
    with contextlib.suppress(ImportError):
        return importlib.import_module("pyarrow.parquet")
    raise Refusal(f"{path}: needs pyarrow; pip install 'evenkeel[parquet]'")


def _scan_mds(path: Path) -> tuple[list[Any], Table]:
    """Mosaic's format: the number of samples n, then n + 1 offsets (uint32), columns as JSON, samples."""
    with path.open("rb") as file:
        (samples,) = struct.unpack("<I", file.read(4))
        ends = np.frombuffer(file.read(4 * (samples + 1)), "<u4").astype(np.int64)
        about = json.loads(file.read(int(ends[0]) - file.tell()))
    if len(ends) != samples + 1 or ends[-1] != path.stat().st_size:
        raise ValueError(f"it should have {ends[-1]} bytes")
    columns = list(zip(about["column_names"], about["column_encodings"], about["column_sizes"], strict=True))
    return [list(column) for column in columns], _table(np.stack([ends[:-1], np.diff(ends)], 1)[:, None])


def _table(places: NDArray[np.int64], key: int = 0) -> Table:
    """A table of offsets and sizes, from an array [samples, fields, 2], with room for keys of so many bytes."""
    of_field = ("<i8", (places.shape[1],))
    table = np.zeros(len(places), [*[("key", f"S{key}")] * bool(key), ("offset", *of_field), ("size", *of_field)])
    table["offset"], table["size"] = places[..., 0], places[..., 1]
    return table


def _names(fields: list[Any]) -> str:
    return listed([field if isinstance(field, str) else field[0] for field in fields]) or "no members"

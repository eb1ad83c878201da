"""The file formats that `Shards` reads: the offsets of samples in each file, and checks that the file is usable.

The files come from other people. A reader here trusts no number in a file before checking it against the file: it
raises an error of any type, which `shard_index` reports in a line, or returns offsets that lie within the file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import struct
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..common.errors import Refusal
from ..common.files import alike
from ..common.naming import kind_of, listed

MEMBER = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
"""Key and extension in the name of a tar's member, as WebDataset splits it."""
BLANK = 64
"""Lines of JSON of at most this many bytes are read, to find blank ones, which do not count."""
META = re.compile(r"__[^/]*__($|/)")
"""Members that WebDataset ignores."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character, or a whole one in two halves, as JSON writes it."""

Table = NDArray[Any]
"""A row a sample: "key" (tar only), and "offset" and "size" of each field, [number of fields], in bytes."""


def _scan_tar(path: Path) -> tuple[list[str], Table]:
    fields: list[str] = []
    keys: dict[bytes, None] = {}
    places: list[tuple[int, int]] = []
    for key, members in _samples(path):
        fields = fields or sorted(members)
        if missing := set(fields) - members.keys():
            raise Refusal(f"{path}: sample {key} has no {names_of(sorted(missing))}, which the samples before it have")
        if more := members.keys() - set(fields):
            raise Refusal(f"{path}: sample {key} has {names_of(sorted(more))}, which the samples before it do not have")
        if key.encode() in keys:
            raise Refusal(f"{path}: the key {key} comes twice; the members of a sample must follow one another")
        keys[key.encode()] = None
        places += (members[name] for name in fields)
    table = table_of(np.array(places, np.int64).reshape(len(keys), len(fields), 2), max(map(len, keys), default=1))
    table["key"] = [*keys]
    return fields, table


def _samples(path: Path) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """(key, extension -> (offset, size)) of each sample of a tar."""
    key, members, end = "", dict[str, tuple[int, int]](), 0
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for info in iter(tar.next, None) if tar.firstmember else ():  # type: ignore[attr-defined]  # 3.10's next fails
            tar.members.clear()  # type: ignore[attr-defined]  # otherwise it would store them all
            if info.size < 0:  # tarfile would loop forever
                raise ValueError(f"its member {info.name!r:.60} has {info.size} bytes")
            end = info.offset_data + -(-info.size // 512) * 512
            parts = MEMBER.fullmatch(info.name)
            if not parts or META.match(info.name):
                continue
            if info.issym() or info.islnk() or info.issparse():
                kind = "sparse" if info.issparse() else "a link"
                remedy = "without --sparse" if info.issparse() else "with --hard-dereference"
                raise Refusal(f"{path}: {info.name} is {kind}, so its content is not here; make the tar {remedy}")
            if not info.isreg():
                continue
            info.name.encode()  # a name that cannot be encoded is refused
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
                raise ValueError("there is data after its end mark, as if two files had been joined")


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
            try:
                if not isinstance(value := parse_json(os.pread(file.fileno(), size, at)), dict):
                    raise ValueError(f"it is {kind_of(value)}, not an object")
            except ValueError as error:
                raise ValueError(f"the line at byte {at}: {error}") from None
    return [], table_of(places[:, None])


def _scan_parquet(path: Path) -> tuple[list[str], list[int]]:
    footer = parquet(path).ParquetFile(path).metadata
    groups = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    if min(groups, default=0) < 0 or sum(groups) != footer.num_rows:
        raise ValueError(f"its footer says {footer.num_rows} rows, but its row groups have {sum(groups)}")
    return sorted(footer.schema.to_arrow_schema().names), groups


def parquet(path: Path) -> Any:
    """The module that reads Parquet.

    Raises:
        Refusal: pyarrow is not installed.
    """
    with contextlib.suppress(ImportError):
        return importlib.import_module("pyarrow.parquet")
    raise Refusal(f"{path}: needs pyarrow; pip install pyarrow")


def _scan_mds(path: Path) -> tuple[list[Any], Table]:
    """Mosaic's format: the number of samples n, then n + 1 offsets (uint32), columns as JSON, samples."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (samples,) = struct.unpack("<I", file.read(4))
        if 4 * (samples + 2) > size:
            raise ValueError(f"its header says {samples:,} samples, whose offsets do not fit into its {size:,} bytes")
        ends = np.frombuffer(file.read(4 * (samples + 1)), "<u4").astype(np.int64)
        start = file.tell()
        if ends[-1] != size:
            raise ValueError(f"it should have {ends[-1]} bytes")
        if len(falling := np.flatnonzero(np.diff(ends, prepend=start) < 0)):
            raise ValueError(f"its offset {falling[0]} is {ends[falling[0]]}, before the beginning of that part")
        about = parse_json(file.read(int(ends[0]) - start))
    parts = [about[f"column_{name}"] for name in ("names", "encodings", "sizes")]
    if not all(isinstance(part, list) for part in parts):
        raise ValueError("its names, encodings and sizes of columns are not lists")
    columns = [list(column) for column in zip(*parts, strict=True)]
    if not wrong_field("mds", columns):
        least = sum(size or 4 for *_, size in columns)
        if len(short := np.flatnonzero(np.diff(ends) < least)):
            raise ValueError(
                f"its sample {short[0]} has {np.diff(ends)[short[0]]} bytes, its columns need at least {least}"
            )
    return columns, table_of(np.stack([ends[:-1], np.diff(ends)], 1)[:, None])


def parse_json(content: bytes) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: it is invalid, or has half of a character (a lone surrogate), which cannot be written or printed.
    """
    value = json.loads(content.decode("utf-8-sig"))
    if SURROGATE.search(content):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def table_of(places: NDArray[np.int64], key: int = 0) -> Table:
    """A table of offsets and sizes, from an array [samples, fields, 2], with space for keys of this many bytes."""
    of_field = ("<i8", (places.shape[1],))
    table = np.zeros(len(places), [*[("key", f"S{key}")] * bool(key), ("offset", *of_field), ("size", *of_field)])
    table["offset"], table["size"] = places[..., 0], places[..., 1]
    return table


def wrong_field(kind: str, fields: list[Any]) -> str:
    """The error in the fields of samples, in a line; empty: there is none."""
    columns = fields if kind == "mds" else [[field, "", None] for field in fields]
    for field, column in zip(fields, columns, strict=True):
        right = isinstance(column, list) and len(column) == 3 and alike(column[:2], [""])
        if not right or not (column[2] is None or (type(column[2]) is int and 0 < column[2] < 2**32)):
            return f"{field!r:.60} is not a {'column' if kind == 'mds' else 'name of a field'}"
    names = [column[0] for column in columns]
    twice = [name for name in names if names.count(name) > 1]
    return f"two of its columns have the name {twice[0]!r:.60}, and would be read as one" if twice else ""


def names_of(fields: list[Any]) -> str:
    """The names of fields, in a line."""
    return listed([field if isinstance(field, str) else field[0] for field in fields]) or "no members"


SCANS: Mapping[str, Callable[[Path], tuple[list[Any], Any]]] = {
    "tar": _scan_tar,
    "jsonl": _scan_lines,
    "parquet": _scan_parquet,
    "mds": _scan_mds,
}
"""By format: (path) -> the fields of its samples, and the `Table` of offsets, or a Parquet file's row groups."""

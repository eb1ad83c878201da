"""`Shards`: a folder of tar, JSON lines, Parquet or MDS files as one map-style data set, read by its index."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from io import BytesIO
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ..common.errors import EndedByData, Refusal
from ..common.naming import listed
from .blocks import Blocks
from .shard_formats import parquet, parse_json
from .shard_index import Shard, mapped, read_index

Decoder = Callable[[bytes], Any]
Sample = dict[str, Any]

OPEN_FILES = 128
"""Maximum number of open files of a process."""


def _number(kind: str, content: bytes) -> Any:
    (value,) = np.frombuffer(content, np.dtype(kind).newbyteorder("<"))
    return value.item()


BASIC: Mapping[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), parse_json),
    "npy": lambda content: np.load(BytesIO(content)),  # refuses pickled objects, which may run code
}
"""Decoders for members of a tar, by extension, as in WebDataset; other members are bytes."""

ENCODINGS: Mapping[str, Decoder] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    **{f"{kind}{bits}": partial(_number, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{kind: partial(_number, kind) for kind in ("float16", "float32", "float64")},
    "str": bytes.decode,
    "json": parse_json,
    "int": partial(_number, "int64"),
    "str_int": int,
    "str_float": float,
}
"""Decoders for columns of MDS, by encoding; images stay bytes. There is none for pickles, which may run code."""


class Shards(Dataset[Any]):
    """The samples of all shards of a folder that `python -m evenkeel data index` has indexed.

    A sample is a dict: for a tar its members by extension and `__key__`, for other formats its fields or columns. In
    training, blocks of neighbouring samples are read in a random order, and the samples of a window of blocks are mixed
    (`Blocks`), so that files are read in long runs. Any number of processes may read, forked or spawned.

    Args:
        folder: with shards and their index.
        decode: from extension or column to a function of its content, in addition to `BASIC` or `ENCODINGS`:
            `{"jpg": decode_jpeg, "json": bytes}`. "seg.png" uses the function for "png", unless it has its own.
        fields: the members or columns to read; empty: all.
        transform: makes the sample from such a dict; draws the random numbers of that sample.
        block: samples per block. In Parquet, row groups are the blocks.
        window: blocks that are mixed; 0: 64, or 8 row groups, because each process has up to 1.5 times as many in
            memory.

    Raises:
        Refusal: there is no index, the size of a shard has changed, or samples lack a field.

    Example:
        >>> Shards("shards", {"jpg": decode_jpeg}, transform=lambda it: (it["jpg"], it["cls"]))[0]  # doctest: +SKIP
        (tensor(...), 3)
    """

    def __init__(
        self,
        folder: str | Path,
        decode: Mapping[str, Decoder] | None = None,
        fields: Sequence[str] = (),
        transform: Callable[[Sample], Any] | None = None,
        block: int = 128,
        window: int = 0,
    ) -> None:
        self.folder, self.transform, self.block = Path(folder), transform, block
        index = read_index(self.folder)
        self.format, self.shards = index.format, index.shards
        self.window = window or (8 if index.format == "parquet" else 64)
        if block < 1 or self.window < 1:
            raise Refusal(f"{folder}: block and window must be at least 1, and are {block} and {window}")
        if self.format == "parquet":
            parquet(self.folder)
        names = [column[0] for column in index.fields] if index.format == "mds" else index.fields
        own = [field for field in decode or {} if self.format != "tar"]  # of a tar, also the ends of extensions
        if names and (unknown := [field for field in [*fields, *own] if field not in names]):
            raise Refusal(f"{folder}: its samples have no {listed(unknown)}; they have {listed(names, most=20)}")
        self._columns, self._fields = index.fields, list(fields or names)
        self._decoders = self._choose(decode or {})
        self._table = self.folder / index.table
        self._starts = [0, *accumulate(shard.samples for shard in index.shards)]
        self._groups = [(shard, group) for shard in index.shards for group in range(len(shard.groups))]
        self._group_starts = [0, *accumulate(shard.groups[group] for shard, group in self._groups)]
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> Any:
        number = range(len(self))[number]
        place = bisect_right(self._starts, number) - 1
        sample, field = dict[str, Any](), "sample"
        try:
            sample = self._parts(self.shards[place], number)
            for field, decoder in self._decoders.items():
                sample[field] = decoder(sample[field])
        except Exception as error:
            key = f" ({sample['__key__']})" if "__key__" in sample else ""
            raise EndedByData(
                f"{self.folder / self.shards[place].name}: sample {number - self._starts[place]} of the file{key}: "
                f"{field} cannot be read: {type(error).__name__}: {error}"
            ) from error
        return self.transform(sample) if self.transform else sample

    def order_blocks(self) -> Blocks:
        """Runs of neighbouring samples of a shard; in Parquet, row groups."""
        lengths: list[int] = []
        for shard in self.shards:
            full, rest = divmod(shard.samples, self.block)
            lengths += shard.groups or [self.block] * full + [rest]
        return Blocks(lengths, self.window)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}  # a spawned process reads its own

    def _choose(self, own: Mapping[str, Decoder]) -> dict[str, Decoder]:
        """The decoder of each field that has one."""
        if self.format == "mds":
            chosen = {name: own.get(name) or ENCODINGS.get(encoding) for name, encoding, _ in self._columns}
            for name, encoding, _ in self._columns:
                if name in self._fields and not chosen[name]:
                    raise Refusal(
                        f"{self.folder}: column {name} is encoded as {encoding}, which is not supported; give `decode` "
                        f"a function of bytes for {name}, or name other columns in `fields`"
                    )
        elif self.format == "tar":
            known = {**BASIC, **own}
            chosen = {field: known.get(field) or known.get(field.rpartition(".")[2]) for field in self._fields}
        else:
            chosen = {**own}
        return {field: decoder for field, decoder in chosen.items() if decoder and field in (self._fields or own)}

    def _parts(self, shard: Shard, number: int) -> Sample:
        """The fields of a sample, not yet decoded."""
        if self.format == "parquet":
            return self._row(number)
        row = _mapped(self._table)[number]
        offsets, sizes = row["offset"].tolist(), row["size"].tolist()
        if min(*offsets, *sizes) < 0 or max(map(add, offsets, sizes)) > shard.bytes:
            raise ValueError(f"the index has offsets {offsets} and sizes {sizes}, but the file has {shard.bytes} bytes")
        file = _opened(self.folder / shard.name, shard.bytes)
        if self.format == "tar":  # the members of a sample follow one another: one read for all
            places = {name: (offsets[i], sizes[i]) for i, name in enumerate(self._columns) if name in self._fields}
            first, last = min(at for at, _ in places.values()), max(at + size for at, size in places.values())
            content = file.read(first, last - first)
            members = {name: content[at - first : at - first + size] for name, (at, size) in places.items()}
            return {"__key__": row["key"].decode(), **members}
        content = file.read(offsets[0], sizes[0])
        sample: Sample = _object(content) if self.format == "jsonl" else _of_mds(content, self._columns)
        return {field: sample[field] for field in self._fields} if self._fields else sample

    def _row(self, number: int) -> Sample:
        """A row of a Parquet file, from its row group, which stays in memory for the others."""
        group = bisect_right(self._group_starts, number) - 1
        if group not in self._kept:
            shard, inside = self._groups[group]
            file = parquet(self.folder).ParquetFile(self.folder / shard.name, memory_map=True)
            # without threads: a forked loader process has none
            rows = file.read_row_group(inside, columns=self._fields, use_threads=False)
            if len(rows) != shard.groups[inside]:
                raise ValueError(f"its row group {inside} has {len(rows)} rows, not {shard.groups[inside]}")
            self._kept[group] = rows
            if 2 * len(self._kept) > 3 * self.window:  # the longest window (`blocks`)
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        row: Sample = self._kept[group].slice(number - self._group_starts[group], 1).to_pylist()[0]
        return row


def _object(content: bytes) -> Sample:
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _of_mds(content: bytes, columns: Sequence[Any]) -> Sample:
    """The columns of a sample: first the sizes of those that vary (uint32), then the contents."""
    vary = [name for name, _, size in columns if not size]
    heads = dict(zip(vary, np.frombuffer(content, "<u4", len(vary)).tolist(), strict=True))
    ends = [*accumulate((size or heads[name] for name, _, size in columns), initial=4 * len(vary))]
    if ends[-1] != len(content):
        raise ValueError(f"its columns have {ends[-1]} bytes, but the sample {len(content)}")
    return {name: content[ends[i] : ends[i + 1]] for i, (name, *_) in enumerate(columns)}


class _File:
    """An open file. Reads at an offset, so that processes forked from this one may share it."""

    def __init__(self, path: Path, size: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        if (found := os.fstat(self.descriptor).st_size) != size:
            raise OSError(f"the file has {found} bytes now, but the index says {size}")

    def read(self, offset: int, size: int) -> bytes:
        content = os.pread(self.descriptor, size, offset)
        while len(content) < size and (more := os.pread(self.descriptor, size - len(content), offset + len(content))):
            content += more  # Linux reads less than 2 GiB at a time, see read(2)
        if len(content) < size:
            raise OSError(f"{len(content)} of {size} bytes could be read at byte {offset}")
        return content

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_opened = lru_cache(OPEN_FILES)(_File)


_mapped = lru_cache(16)(mapped)

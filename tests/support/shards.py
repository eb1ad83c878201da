"""Small shards in every format, written as others write them."""

import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

Members = Iterable[tuple[str, Mapping[str, bytes]]]


def write_tar(path: Path, samples: Members) -> None:
    """As WebDataset's TarWriter does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, content in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def numbered(start: int, count: int) -> Members:
    """Samples with a number and as many bytes."""
    return [(f"{n:05}", {"cls": str(n).encode(), "seg.bin": b"x" * n}) for n in range(start, start + count)]


def tars(folder: Path, lengths: Iterable[int]) -> Path:
    """A folder of tars with so many numbered samples each."""
    start = 0
    for number, length in enumerate(lengths):
        write_tar(folder / f"train-{number:03}.tar", numbered(start, length))
        start += length
    return folder


def write_lines(path: Path, rows: Iterable[dict]) -> None:
    """JSON lines, with a blank one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "\n")


def write_mds(path: Path, columns: Mapping[str, str], rows: Iterable[Mapping[str, bytes]], fixed: int) -> None:
    """Mosaic's format; the columns whose encoding is a number have so many bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [fixed if encoding.startswith(("int", "float")) else None for encoding in columns.values()]
    about = {"column_encodings": [*columns.values()], "column_names": [*columns], "column_sizes": sizes}
    header = json.dumps(about | {"compression": None, "format": "mds"}, sort_keys=True).encode()
    contents = []
    for row in rows:
        vary = [len(row[name]) for name, size in zip(columns, sizes, strict=True) if size is None]
        contents.append(struct.pack(f"<{len(vary)}I", *vary) + b"".join(row[name] for name in columns))
    ends = [4 + 4 * (len(contents) + 1) + len(header)]
    for content in contents:
        ends.append(ends[-1] + len(content))
    path.write_bytes(struct.pack(f"<{1 + len(ends)}I", len(contents), *ends) + header + b"".join(contents))

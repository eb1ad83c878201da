"""`python -m evenkeel data`: index a folder of shards, and verify it against its index."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import track

from ..common.display import say
from ..common.files import sha256_of
from ..data.shard_index import MANIFEST, read_index, table_is_whole, write_index

Folder = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="A folder of .tar, .jsonl, .parquet or .mds files.")]


@dataclass(frozen=True)
class IndexShards:
    """Read all shards of a folder and write the index for `Shards`: shards.index.json and a table beside it."""

    folder: Folder

    def __call__(self) -> int:
        """Write the index."""
        index = write_index(self.folder, _tracked)
        size = decimal(sum(shard.bytes for shard in index.shards))
        say(f"{self.folder / MANIFEST}: {index.samples:,} samples, {index.format}, shards: {len(index.shards)}, {size}")
        return 0


@dataclass(frozen=True)
class VerifyShards:
    """Read every shard of a folder and compare its sha256 with the index. Exit code 1: one differs."""

    folder: Folder

    def __call__(self) -> int:
        """Print a line for each shard that differs, and the number of those that do not."""
        index = read_index(self.folder)
        if not table_is_whole(self.folder, index):
            say(f"{self.folder / index.table}: DAMAGED: its contents do not match its name; index the folder again")
            return 1
        shards = index.shards
        found = zip(
            shards, _tracked((sha256_of(self.folder / shard.name) for shard in shards), len(shards)), strict=True
        )
        damaged = [shard.name for shard, digest in found if digest != shard.sha256]
        for name in damaged:
            say(f"{self.folder / name}: DAMAGED: its sha256 differs from the index")
        say(f"{len(shards) - len(damaged)} of {len(shards)} shards match the index")
        return int(bool(damaged))


@dataclass(frozen=True)
class DataCommand:
    """Index or verify a folder of shards (tar, JSONL, Parquet, MDS).

    Example: python -m evenkeel data index /data/shards
    """

    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[IndexShards, tyro.conf.subcommand("index")] | Annotated[VerifyShards, tyro.conf.subcommand("verify")]
    ]

    def __call__(self) -> int:
        """Run the chosen action."""
        return self.action()


def _tracked(things: Iterable[Any], number: int) -> Iterable[Any]:
    """The same things, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(things, "reading", number, console=console, transient=True, disable=not sys.stderr.isatty())

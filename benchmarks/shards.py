"""Loading tar shards: `Shards` by the engine's loader, beside WebDataset's and torchdata's own, as ratios.

    python benchmarks/shards.py [--workers 2] [--samples 20000] [--bytes 4096] [--rounds 5]

Samples have two members, a class and so many random bytes, in shards of 1,000. All sides give batches of 64 bytes and
classes, decoded alike, shuffled: WebDataset by a buffer of 1,000, ours by blocks and windows. theirs: `WebLoader`.
stateful: the same pipeline in torchdata's `StatefulDataLoader`. The rounds are interleaved in one process; a ratio is
samples/s over theirs of the same round. The files are in the page cache. Needs `pip install webdataset torchdata`.
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from evenkeel.data.loader import make_loader
from evenkeel.data.sampler import ElasticSampler
from evenkeel.data.shard_index import write_index
from evenkeel.data.shards import Shards

BATCH, SHARD = 64, 1000


def write(folder: Path, samples: int, size: int) -> None:
    """The shards."""
    for first in range(0, samples, SHARD):
        with tarfile.open(folder / f"{first // SHARD:06}.tar", "w") as tar:
            for number in range(first, min(first + SHARD, samples)):
                for name, content in (("cls", str(number % 1000).encode()), ("bin", os.urandom(size))):
                    info = tarfile.TarInfo(f"{number:09}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def as_tensors(sample: dict[str, Any]) -> Any:
    """The bytes as a tensor, and the class."""
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8), int(sample["cls"])


def ours(folder: Path, workers: int) -> Callable[[], Iterable[Any]]:
    """As `train.py` loads."""
    write_index(folder)
    dataset = Shards(folder, transform=as_tensors)
    sampler = ElasticSampler(dataset, BATCH, BATCH, num_replicas=1, rank=0)
    batches = make_loader(dataset, sampler, "evaluation", workers, torch.device("cpu"))
    return lambda: batches


def theirs(folder: Path, workers: int, stateful: bool) -> Callable[[], Iterable[Any]]:
    """WebDataset's pipeline in its own loader, or in torchdata's."""
    import webdataset as wds
    from torchdata.stateful_dataloader import StatefulDataLoader

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    dataset = (
        wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(1000).map(as_tensors).batched(BATCH)
    )
    kind = StatefulDataLoader if stateful else wds.WebLoader
    batches = kind(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: batches


def main() -> None:
    """All sides, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("workers", 2), ("samples", 20_000), ("bytes", 4096), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, options.samples, options.bytes)
        sides = {
            "theirs": theirs(folder, options.workers, stateful=False),
            "stateful": theirs(folder, options.workers, stateful=True),
            "ours": ours(folder, options.workers),
        }
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(options.rounds + 1):
            for side, batches in sides.items():
                begin = time.perf_counter()
                seen = sum(len(batch[1]) for batch in batches())
                assert seen == options.samples, f"{side} gave {seen} samples"
                if number:  # the first starts the loader processes
                    speeds[side].append(seen / (time.perf_counter() - begin))
        for side, found in speeds.items():
            ratios = [mine / base for mine, base in zip(found, speeds["theirs"], strict=True)]
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{side:10} {median(found):9,.0f} samples/s  {median(ratios):5.2f} {spread}")


if __name__ == "__main__":
    main()

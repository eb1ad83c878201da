#!/usr/bin/env python3
"""How much memory a rank of `--shard on` takes, beside DDP's: three jobs by torchrun, one after the other.

    python benchmarks/shard_memory.py --ranks 4

The host's memory stands for a GPU's: each rank reads from /proc by how many bytes the anonymous memory of its process
has grown since just before it built the model, at its peak until the first step (on rank 0, which has all of it, and on
the others) and at its peak during the steps.
Slots for the keeper are shared memory, which is host memory beside a GPU too; they are not counted, but printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenkeel.data.dataset import SizedDataset
from evenkeel.tasks.transformer import Decoder
from evenkeel.training.task import Task

ROOT = Path(__file__).resolve().parent.parent
SIDES = {
    "ddp": ["--reduce", "ring"],
    "ddp, tree": ["--reduce", "tree"],
    "sharded": ["--reduce", "tree", "--shard", "on"],
}
WEIGHT, ADAMW = 4, 16
"""Bytes of a parameter, and of its state: weight, gradient and two moments."""


@dataclass(frozen=True)
class Options:
    """Compare the memory of ranks."""

    ranks: int = 4
    """Processes of each job."""
    width: int = 384
    """Of the transformer."""
    layers: int = 8
    """Of the transformer."""
    vocabulary: int = 4096
    """Of the tokens."""
    steps: int = 5
    """Of each job."""


def memory() -> dict[str, int]:
    """The bytes of this process by kind, and VmHWM, their largest sum so far."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0].startswith(("Rss", "VmHWM"))}


def peak() -> int:
    """The most bytes of anonymous memory since the last call; files and shared memory do not shrink meanwhile."""
    now = memory()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"]


class Tokens(Dataset[Tensor]):
    """Samples of random tokens."""

    def __init__(self, samples: int, vocabulary: int) -> None:
        self.samples, self.vocabulary = samples, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, self.vocabulary, (33,), generator=torch.Generator().manual_seed(index))


@dataclass
class Measured(Task):
    """Writes each rank's growth into a file."""

    width: int = 384
    """Of the transformer."""
    layers: int = 8
    """Of the transformer."""
    vocabulary: int = 4096
    """Of the tokens."""
    folder: str = ""
    """For the files."""

    def train_dataset(self) -> SizedDataset:
        """Random tokens."""
        return Tokens(4096, self.vocabulary)

    def test_dataset(self) -> SizedDataset:
        """A few of them."""
        return Tokens(8, self.vocabulary)

    def model(self) -> nn.Module:
        """The transformer of `lm`."""
        from evenkeel.training import sharding  # noqa: F401  # imports FSDP2, and the next line torch's compiler:

        torch.optim.SGD([torch.ones(1)])  # their memory does not count
        peak()
        self.found = {"base": memory()["RssAnon"], "steps": 0}
        return Decoder(self.vocabulary, self.width, heads=4, layers=self.layers, dropout=0.0, end=None)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy of the next token, after a look at the memory."""
        grown = peak() - self.found["base"]
        if "start" not in self.found:
            self.found["start"] = grown
        else:
            self.found["steps"] = max(grown, self.found["steps"])
        self.found["shared"] = memory()["RssShmem"]
        (Path(self.folder) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(self.found))
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def job(options: Options, folder: Path, more: list[str]) -> dict[str, int]:
    """Run a job: by kind of growth, the bytes of the rank that has most."""
    folder.mkdir()
    samples = 4 * options.ranks  # two micro-batches of two samples for each rank
    words = ["--task", f"{Path(__file__)}:Measured", "--folder", folder, "--run-dir", folder / "run"]
    words += ["--width", options.width, "--layers", options.layers, "--vocabulary", options.vocabulary]
    words += ["--batch-size", samples, "--micro-batch", 2, "--max-steps", options.steps, "--wandb", "disabled"]
    words += ["--eval-every", options.steps, "--checkpoint-every", 0, *more]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    # memory that is freed goes back at once, so that anonymous memory is what is in use
    exact = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([*command, ROOT / "train.py", *map(str, words)], env=exact, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(options.ranks)]
    others = max((each["start"] for each in found[1:]), default=0)
    return {kind: max(each[kind] for each in found) for kind in found[0]} | {"others": others}


def main(options: Options) -> None:
    """Measure and print."""
    with torch.device("meta"):
        model = Decoder(options.vocabulary, options.width, heads=4, layers=options.layers, dropout=0.0, end=None)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    inside = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    block = 4 * max(*inside, numbers - sum(inside))
    state = ADAMW * numbers
    print(f"{numbers / 1e6:.1f} million parameters, {state / 1e6:.0f} MB of state, {options.ranks} ranks")
    with tempfile.TemporaryDirectory() as folder:
        grown = {side: job(options, Path(folder).resolve() / str(i), SIDES[side]) for i, side in enumerate(SIDES)}
    for side, found in grown.items():
        figures = ", ".join(f"{kind} {found[kind] / 1e6:.0f} MB" for kind in ("start", "others", "steps", "shared"))
        print(f"{side}: {figures}")
    ours = grown["sharded"]
    for side in ("ddp", "ddp, tree"):
        print(f"growth of the peak, sharded / {side} = {ours['steps'] / grown[side]['steps']:.2f}")
    bound = state / options.ranks + block
    part = WEIGHT * numbers / options.ranks + block
    print(f"until the first step, not on rank 0 / (weights / ranks + the largest block) = {ours['others'] / part:.2f}")
    print(f"growth until the first step / (state / ranks + the largest block) = {ours['start'] / bound:.2f}")


if __name__ == "__main__":
    main(tyro.cli(Options))

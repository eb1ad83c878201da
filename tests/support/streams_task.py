"""Substreams whose samples say where they come from, and a task that writes down what it has trained on."""

import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from evenkeel.common.phases import activity
from evenkeel.data.streams import Streams
from evenkeel.training.task import Task

LENGTHS = [7, 4, 9, 5, 6, 11]
"""Of the substreams in even turns. Others have one sample more."""

Number = tuple[int, int, int]
"""Of a sample: substream, turn, number within it."""


def turn_of(k: int, turn: int) -> list[Number]:
    return [(k, turn, n) for n in range(LENGTHS[k % len(LENGTHS)] + turn % 2)]


class Plain:
    """Can only be read; counts what is read in this process."""

    read = 0

    def __init__(self, k: int, turn: int) -> None:
        self.samples, self.at = turn_of(k, turn), 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.samples):
            self.at += 1
            Plain.read += 1
            yield self.made(self.samples[self.at - 1])

    def made(self, number: Number) -> Any:
        return number


class Seeking(Plain):
    def seek_sample(self, samples: int) -> int:
        self.at = min(samples, len(self.samples))
        return self.at


class Stateful(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


SOURCES: dict[str, type[Plain]] = {"plain": Plain, "seek": Seeking, "state": Stateful}


def read_in_order(substreams: int, batch: int, samples: int) -> list[Number]:
    """What a run trains on, from endless iterators alone."""

    def endless(k: int) -> Iterator[Number]:
        turn = 0
        while True:
            yield from turn_of(k, turn)
            turn += 1

    readers, found = [endless(k) for k in range(substreams)], list[Number]()
    while len(found) < samples:
        for reader in readers:
            found += [next(reader) for _ in range(batch // gcd(batch, substreams))]
    return found[:samples]


@dataclass
class Streamed(Task):
    """Linear regression on noise that is drawn as samples are read."""

    best: ClassVar[Any] = None
    harmless: ClassVar[frozenset[str]] = frozenset({"pause", "source"})

    record: str = ""
    """Folder for the records: a line for each sample that is trained on."""
    source: Literal["plain", "seek", "state"] = "plain"
    """What the source can do to be quick to resume."""
    substreams: int = 6
    pause: float = 0.0
    """Seconds that a micro-batch takes."""

    def train_dataset(self) -> Any:
        return Streams(self.opened, self.substreams, state_every=0.2)

    def opened(self, k: int, turn: int) -> Iterable[Any]:
        source = SOURCES[self.source](k, turn)
        source.made = lambda number: (torch.rand(4) + random.random(), torch.tensor(number))
        return source

    def test_dataset(self) -> Any:
        return [(torch.full((4,), n / 8), torch.tensor([0, 0, n])) for n in range(8)]

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.pause)
        features, numbers = batch
        if self.record and model.training:
            lines = [" ".join(map(str, [activity.step, *number])) for number in numbers.tolist()]
            with (Path(self.record) / f"rank-{os.environ.get('RANK', 0)}").open("a") as file:
                file.write("\n".join(lines) + "\n")
        return (model(features).squeeze(1) - numbers[:, 2] / 10).square().mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        features, numbers = batch
        return {"loss": (model(features).squeeze(1) - numbers[:, 2] / 10).square()}


def trained_on(folder: Path) -> set[tuple[int, ...]]:
    """(step, substream, turn, number) of all samples that any attempt has trained on."""
    return {tuple(map(int, line.split())) for path in folder.iterdir() for line in path.read_text().splitlines()}

"""Data that changes while the job runs: which changes are found, and what is none."""

import os
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from evenkeel.config import Config
from evenkeel.data import changes
from evenkeel.data.changes import Changes
from evenkeel.data.data_digest import TWICE, digest_samples

BUFFER = [torch.zeros(2)] * 12


class Data(Dataset[Any]):
    """What a function makes of a number and of what is held."""

    def __init__(self, held: Any, sample: Callable[[Any, int], Any] = lambda held, index: held[index]) -> None:
        self.held, self.sample = held, sample
        self.reads = 0
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.cache.setdefault(index, index) * 0 + self.sample(self.held, index)


class Global(Data):
    def __getitem__(self, index: int) -> Any:
        return BUFFER[index]


def write(held: Any) -> None:
    """Change the last sample, which is one of those that are compared."""
    held[11] = held[11] + 1


def inner(own: Any, _: Any, index: int) -> Any:
    return own[index]


def enclosing(own: Any) -> Callable[[Any, Any], Any]:
    return lambda _, index: own if index is None else own[index]


class Disconnected:
    """As a handle of a database or of a remote file may be."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"not connected: {name}")


def with_empty_cell() -> Callable[[Any, int], Any]:
    def sample(_held: Any, index: int) -> Any:
        return index if index >= 0 else never

    if len(BUFFER) > 12:
        never = 0
    return sample


def augmented(held: Any, index: int) -> Tensor:
    return torch.rand(3) + random.random() + float(np.random.rand())


def watched(dataset: Any, workers: int) -> Changes:
    sets = {"training": dataset, "test": TensorDataset(torch.ones(3))}
    return Changes(Config(num_workers=workers), sets, digest_samples(Config(), sets, TWICE)[0])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Data(torch.zeros(12, 2)), lambda data: write(data.held)),
        (lambda: Data(np.zeros((12, 2))), lambda data: write(data.held)),
        (lambda: Data([0.0] * 12), lambda data: write(data.held)),
        (lambda: Data(deque([0] * 12)), lambda data: write(data.held)),
        (lambda: Data(dict.fromkeys(range(12), 0)), lambda data: write(data.held)),
        (lambda: Data(0, lambda held, index: held), lambda data: setattr(data, "held", 1)),
        (lambda: Data(torch.zeros(12)), lambda data: setattr(data, "held", torch.ones(12))),
        (lambda: Subset(Data(torch.zeros(20)), range(12)), lambda data: write(data.dataset.held)),
        (lambda: TensorDataset(torch.zeros(12, 2)), lambda data: write(data.tensors[0])),
        (lambda: Data(None, partial(inner, [0] * 12)), lambda data: write(data.sample.args[0])),
        (lambda: Data(None, enclosing([0] * 12)), lambda data: write(data.sample(None, None))),
        (lambda: Data(None, lambda _, i, own=[0] * 12: own[i]), lambda data: write(data.sample.__defaults__[0])),
        (lambda: Global(None), lambda _: write(BUFFER)),
    ],
    ids="tensor array list deque dict number attribute subset tensors partial closure default global".split(),  # noqa: SIM905
)
def test_a_change_is_found(make: Callable[[], Any], change: Callable[[Any], None], workers: int) -> None:
    dataset = make()
    changed = watched(dataset, workers)
    assert changed() == changed() == ""
    change(dataset)
    assert changed() == "samples of the training data are not what they were when the job began"


@pytest.mark.parametrize("workers", [0, 1])
def test_another_length_is_found(workers: int) -> None:
    data = [0] * 12
    changed = watched(data, workers)
    data.append(0)
    assert changed() == "the training data had 12 samples when the job began and has 13 now"


NO_CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "augmentation": (Data(None, augmented), lambda data: None),
    "a cache": (Data(None, augmented), lambda data: (data.cache.clear(), setattr(data, "reads", 99))),
    "what is not read": (Data(torch.ones(2), augmented), lambda data: data.held.add_(1)),
    "own dice": (Data(np.random.default_rng(), lambda dice, index: dice.random() * 10**index), lambda data: None),
    "the process": (Data(None, lambda _, index: os.getpid()), lambda data: setattr(data, "reads", 99)),
    "what cannot be looked at": (Data(Disconnected(), augmented), lambda data: None),
    "nested tensors": (Data(torch.nested.nested_tensor([torch.ones(2)]), augmented), lambda data: None),
    "an empty cell": (Data(None, with_empty_cell()), lambda data: None),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", NO_CHANGES)
def test_what_is_no_change(name: str, workers: int) -> None:
    dataset, change = NO_CHANGES[name]
    changed = watched(dataset, workers)
    for _ in range(2):
        assert changed() == ""
        change(dataset)
    assert changed() == ""


def test_coins_of_its_own_that_fell_alike_at_the_start_are_not_a_change() -> None:
    """Of four samples that are one of two each, two reads agree once in sixteen times."""
    coin = [1]
    data = Data(None, lambda _, index: float(random.SystemRandom().choice(coin)))
    changed = watched(data, 0)
    assert changed() == ""
    coin.append(-1)
    assert changed() == changed() == ""


@pytest.mark.parametrize("held", [list(range(10**6)), {str(i): [i] for i in range(10**5)}, np.zeros(10**7), []])
def test_of_much_little_is_looked_at(held: Any) -> None:
    if len(held) == 0:  # it holds itself, and many others
        held += [held, *([[]] for _ in range(10**5))]
    assert len(list(changes._values({"training": held}))) < 1000

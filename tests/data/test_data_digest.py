"""A few samples of each data set, compared among ranks and with the run: what must be noticed, and what must not."""

import os
import random
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from evenkeel.common.errors import Refusal
from evenkeel.config import Config
from evenkeel.data.data_digest import OFTEN, ONCE, TWICE, alike, difference, digest, digest_samples
from evenkeel.data.dataset import InMemory, limited
from evenkeel.data.randomness import seed_host
from evenkeel.tasks.registry import load_task
from evenkeel.training.task_data import evaluation_sets, training_set
from tests.support.small_runs import ODD_TASKS

Pair = namedtuple("Pair", ["x", "y"])
CONFIG = Config()


@dataclass
class Record:
    x: Tensor
    where: str


class Opaque:
    """Nothing but an address to tell one from another."""


class Map(Dataset[Any]):
    """What a function makes of a number."""

    def __init__(self, function: Callable[[int], Any], samples: int = 50) -> None:
        self.function, self.samples = function, samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.function(index)


def both(training: Any, test: Any) -> dict[str, Any]:
    return {"training": training, "test": test}


def picture(seed: int, size: int = 64) -> Tensor:
    """A soft grey image, [3, H, W] in uint8: the mean over neighbours of noise."""
    noise = torch.randn(1, size + 15, size + 15, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.avg_pool2d(noise, 16, 1) * 800 + 128).clamp(0, 255).to(torch.uint8).repeat(3, 1, 1)


def as_jpeg(image: Tensor, quality: int) -> Tensor:
    file = BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
    return torch.from_numpy(np.asarray(Image.open(file)).copy()).permute(2, 0, 1)


def test_other_images_differ_and_another_decoder_does_not() -> None:
    images = [picture(seed) for seed in range(200)]
    digests = [digest(image) for image in images]
    assert all(alike(one, other) == (i == j) for i, one in enumerate(digests) for j, other in enumerate(digests))
    decoded = [as_jpeg(image, 90) for image in images]  # worse than any two decoders of one file
    assert not any(torch.equal(image, other) for image, other in zip(images, decoded, strict=True)), "not bit by bit"
    assert all(alike(one, digest(other)) for one, other in zip(digests, decoded, strict=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(5), torch.tensor([0, 1, 2, 4, 3])),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.linspace(0, 1, 9), torch.linspace(0, 1, 9).flip(0)),
        (torch.linspace(0, 1, 9), torch.linspace(0, 1.2, 9)),
        (torch.zeros(4), torch.full((4,), 1e-3)),
        (torch.ones(4), torch.ones(4).double()),
        (torch.ones(4), torch.ones(2, 2)),
        (torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.complex64) * 1j),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
        (Pair(1, "a cat"), Pair(1, "a dog")),
        ([np.float32(3), 2.5], [np.float32(3), 3.5]),
        (Record(torch.ones(2), "x"), Record(torch.zeros(2), "x")),
        (np.arange(3), np.arange(3)[::-1].copy()),
        (b"one", b"two"),
        (None, 0),
        ({"b": 1, "a": 2}, {"b": 2, "a": 1}),
    ],
    ids=repr,
)
def test_what_counts_in_a_sample(one: Any, other: Any) -> None:
    assert alike(digest([one, "same"]), digest([one, "same"]))
    assert not alike(digest([one, "same"]), digest([other, "same"]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Opaque(), Opaque()),
        (np.array([Opaque()]), np.array([Opaque()])),
        ("/data/node1/cats/1.jpg", "/mnt/scratch/cats/1.jpg"),
        (Record(torch.ones(2), "/a/x"), Record(torch.ones(2), "/b/x")),
        (torch.linspace(-1, 1, 10_000), torch.linspace(-1, 1, 10_000) + 1e-5 * torch.randn(10_000)),
        (torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.0, torch.nan, torch.inf])),
        (torch.linspace(-1, 1, 100).bfloat16(), torch.linspace(-1, 1, 100).bfloat16()),
        ([], []),
        ({"b": 1.0, "a": "2", 3: 4}, {"a": "2", 3: 4, "b": 1.0}),
        (torch.full((4,), 1e300, dtype=torch.float64),) * 2,  # although its square is none
    ],
    ids="object objects path inside bits nan bfloat16 nothing keys huge".split(),  # noqa: SIM905
)
@pytest.mark.filterwarnings("error")
def test_what_does_not_count(one: Any, other: Any) -> None:
    assert alike(digest([one, 1]), digest([other, 1]))


def test_it_reads_little_and_leaves_no_trace() -> None:
    sets = [Map(lambda index: (torch.rand(3) + index, random.random(), np.random.rand())) for _ in range(2)]
    seed_host(1)
    expected = torch.rand(()), random.random(), np.random.rand()
    seed_host(1)
    digests, unsteady = digest_samples(CONFIG, both(*sets), TWICE)
    assert expected == (torch.rand(()), random.random(), np.random.rand())
    assert (list(digests), unsteady) == (["training", "test"], [])
    assert not alike(digests["training"], digests["test"]), "their random numbers are their own"
    assert sets[0].read == [0, 16, 32, 49] * TWICE
    assert digest_samples(CONFIG, both(*sets), TWICE) == (digests, [])
    assert digest_samples(CONFIG, both(limited(sets[0], 10), sets[1]), TWICE)[0].keys() == digests.keys()
    assert digest_samples(CONFIG, both(Map(int, 1), InMemory(torch.zeros(2, 3))), TWICE)[0].keys() == digests.keys()


def test_which_difference_is_told() -> None:
    one, other = ({"training": digest(value)} for value in (1, 2))
    assert difference({}, [one, one]) == difference(one, [one]) == difference(one, [{}, {}]) == ""
    assert difference({}, [{}, one]) == "", "a rank that cannot read its data will say so"
    assert "data of rank 1 differs from rank 0's" in difference(one, [one, other])
    assert "data has changed" in difference(one, [other, other])


@pytest.mark.parametrize("workers", [0, 1])
def test_own_dice_and_samples_that_cannot_be_read_have_no_digest(workers: int) -> None:
    dice = np.random.default_rng()
    config = Config(num_workers=workers)
    flipped = Map(lambda index: torch.ones(3) * (1 if dice.random() < 0.5 else -1))
    assert digest_samples(config, both(flipped, Map(lambda index: os.urandom(4))), OFTEN) == ({}, ["training", "test"])
    noisy = Map(lambda index: torch.ones(9) * index + 0.01 * torch.from_numpy(dice.standard_normal(9)))
    digests, unsteady = digest_samples(config, both(noisy, Map(int)), TWICE)
    assert (list(digests), unsteady) == (["training", "test"], ["training"]), "a little noise is told, and compared"
    for fails in (lambda index: 1 / 0, lambda index: sys.exit(), lambda index: [torch.ones(index)]):
        assert digest_samples(config, both(Map(fails), InMemory(torch.ones(9))), TWICE)[0].keys() == {"test"}
    if workers:
        assert digest_samples(config, both(Map(lambda index: os._exit(3)), Map(int)), TWICE) == ({}, [])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_that_is_shorter_than_its_length_is_refused(workers: int) -> None:
    config, short = Config(num_workers=workers), Map(lambda index: [1.0, 2.0][index])
    with pytest.raises(
        Refusal, match=rf"^the test data has 50 samples by its __len__, .* IndexError: .* at {__file__}:"
    ):
        digest_samples(config, both(Map(int), short), ONCE)
    none = Map(lambda index: [][index])  # a mistake of another kind, of which the training says more
    assert digest_samples(config, both(Map(int), none), ONCE)[0].keys() == {"training"}


def splits(seeded: bool) -> tuple[set[int], set[int]]:
    task = load_task(f"{ODD_TASKS}:Drawn")()
    if seeded:
        parts = training_set(task, CONFIG), evaluation_sets(task, CONFIG)["test"]
    else:
        parts = task.train_dataset(), task.test_dataset()
    train, test = ({int(part[i][1]) for i in range(len(part))} for part in parts)
    return train, test


def test_a_split_at_random_is_the_same_every_time_and_its_parts_do_not_overlap() -> None:
    random.seed()
    torch.seed()
    train, test = splits(seeded=True)
    assert (train | test, train & test) == (set(range(200)), set())
    torch.seed()
    assert splits(seeded=True) == (train, test)
    # the control: called without a seed
    assert splits(seeded=False) != splits(seeded=False)
    assert set.intersection(*splits(seeded=False))

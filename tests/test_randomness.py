"""Seeds that are functions of what they are for."""

from __future__ import annotations

import random
import struct
import sys
from itertools import product

import numpy as np
import pytest
import torch

from evenkeel.randomness import derive, seed_everything


@pytest.mark.parametrize(
    ("place", "seed"),
    [
        ((0, "weights"), 2603318840001070403),
        ((0, "sample", 0, 0), 5218052315050158407),
        ((0, "sample", 3, 12_345), 6046530819168796510),
        ((2**63 - 1, "micro-batch", 10**9, 7), 1268657702641222979),
        ((42, "order", 1, 15), 2144534740396537837),
    ],
)
def test_seeds_never_change(place: tuple[int, str], seed: int) -> None:
    """A run continued with a newer Evenkeel must draw the same numbers. Do not update these: add a new purpose."""
    assert derive(*place) == seed


def test_seeds_of_neighbouring_places_never_collide() -> None:
    seeds = [
        derive(seed, purpose, a, b)
        for seed, purpose, a, b in product((0, 1, 2), ("train", "test", "order"), range(30), range(300))
    ]
    # 81,000 of 2^63: the chance of one collision is 4e-10
    assert len(set(seeds)) == len(seeds)


def test_the_number_of_places_counts_and_so_does_their_order() -> None:
    places = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (-1,), (256,), (0, 256)]
    seeds = {derive(0, "sample", *place) for place in places} | {derive(1, "sample"), derive(0, "samples")}
    assert len(seeds) == len(places) + 2


def test_seeds_use_63_bits_evenly() -> None:
    seeds = np.array([derive(0, "sample", 0, i) for i in range(10_000)])
    ones = np.array([(seeds >> bit & 1).mean() for bit in range(63)])

    assert seeds.min() >= 0  # of int64: none has a 64th bit
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / 100  # 5 standard deviations


def test_purposes_and_neighbours_are_independent() -> None:
    def uniform(purpose: str, shift: int = 0) -> torch.Tensor:
        return torch.tensor([derive(0, purpose, 0, i + shift) / 2**63 for i in range(10_000)], dtype=torch.float64)

    others = [uniform("test"), uniform("micro-batch"), uniform("train", shift=1)]
    correlations = torch.corrcoef(torch.stack([uniform("train"), *others]))[0, 1:]

    assert correlations.abs().max() < 5 / 100  # 5 standard deviations


def test_a_seed_beyond_64_bits_is_refused_rather_than_wrapped() -> None:
    with pytest.raises(struct.error):
        derive(2**63, "weights")


def draw() -> tuple[list[float], list[float], list[float], float, float]:
    return (
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        np.random.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
    )


def test_seed_everything_makes_all_three_generators_repeat() -> None:
    seed_everything(7)
    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True))  # they do move on
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_seed_everything_forgets_half_a_pair_of_gaussians() -> None:
    seed_everything(7)
    expected = random.gauss(0, 1), np.random.randn(), torch.randn(1).item()
    seed_everything(3)
    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # each keeps the second of a pair for later
    seed_everything(7)
    assert (random.gauss(0, 1), np.random.randn(), torch.randn(1).item()) == expected


def test_seed_everything_takes_every_derived_seed() -> None:
    for seed in (0, 1, 2**32 - 1, 2**32, 2**63 - 1, derive(0, "weights")):
        seed_everything(seed)
        assert torch.initial_seed() == seed


def test_seed_everything_needs_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(1)
    expected = np.random.rand()
    seed_everything(1)
    monkeypatch.delitem(sys.modules, "numpy")
    seed_everything(2)
    assert "numpy" not in sys.modules
    assert np.random.rand() == expected

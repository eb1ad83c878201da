"""Seeds that are functions of what they are for."""

import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from evenkeel.data.randomness import derive, seed_computation, seed_host

CPU = torch.device("cpu")


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


def test_seeds_of_neighbouring_places_never_collide_and_use_63_bits_evenly() -> None:
    purposes = ("train", "test", "order")
    seeds = [derive(seed, purpose, a, b) for seed, purpose, a, b in product((0, 1, 2), purposes, range(30), range(300))]
    assert len(set(seeds)) == len(seeds), "81,000 of 2^63: the chance of one collision is 4e-10"
    found = np.array(seeds)
    assert found.min() >= 0  # of int64: none has a 64th bit
    ones = np.array([(found >> bit & 1).mean() for bit in range(63)])
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / len(seeds) ** 0.5  # 5 standard deviations


def test_the_number_of_places_counts_and_so_does_their_order() -> None:
    places = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (-1,), (256,), (0, 256)]
    seeds = {derive(0, "sample", *place) for place in places} | {derive(1, "sample"), derive(0, "samples")}
    assert len(seeds) == len(places) + 2


def test_purposes_and_neighbours_are_independent() -> None:
    def uniform(purpose: str, shift: int = 0) -> torch.Tensor:
        return torch.tensor([derive(0, purpose, 0, i + shift) / 2**63 for i in range(10_000)], dtype=torch.float64)

    others = [uniform("test"), uniform("micro-batch"), uniform("train", shift=1)]
    correlations = torch.corrcoef(torch.stack([uniform("train"), *others]))[0, 1:]

    assert correlations.abs().max() < 5 / 100  # 5 standard deviations


def draw() -> tuple[float, ...]:
    numbers = *torch.rand(3).tolist(), *torch.randn(3).tolist(), *np.random.rand(3).tolist()
    return *numbers, float(np.random.randn()), random.random(), random.gauss(0, 1)


def test_a_seed_makes_all_three_generators_repeat_and_forget_half_a_pair_of_gaussians() -> None:
    seed_host(7)
    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True))  # they do move on
    seed_host(8)
    assert all(a != b for a, b in zip(first, draw(), strict=True))
    random.gauss(0, 1), np.random.randn(), torch.randn(1)  # each keeps the second of a pair for later
    seed_host(7)
    assert draw() == first


SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, derive(0, "weights"))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_streams_are_those_of_the_libraries_own_functions(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    expected = draw()
    for again in (lambda: seed_host(seed), lambda: seed_computation(seed, [CPU])):
        again()
        assert torch.initial_seed() == seed
        assert draw() == expected


def called(function: Callable[[], object]) -> list[str]:
    """The files of torch whose Python functions a call runs."""
    files: list[str] = []
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return [file for file in files if f"{Path(torch.__file__).parent}/" in file]


def test_a_seed_touches_no_type_of_device_that_is_absent() -> None:
    assert called(lambda: seed_host(1)) == []
    assert called(lambda: seed_computation(1, [CPU])) == []
    # the control: torch's own asks each of them
    theirs = called(lambda: torch.manual_seed(1))
    assert any("cuda" in file for file in theirs)
    assert len(theirs) > 10

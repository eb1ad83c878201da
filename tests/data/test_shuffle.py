"""The order of samples: always a permutation, and as good as a random one.

Each statistic below gives the probability, for truly random orders, of a value so low. Seeds are fixed, so a test
gives the same answer every time; with limits of 1e-4 on either side, a true shuffle would fail one of the eleven
for one choice of seeds in 500. That the statistics can fail is shown on shuffles known to be weak.
"""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, permutations
from math import exp, factorial, sqrt

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenkeel.data import shuffle as order
from evenkeel.data.shuffle import shuffled

Order = NDArray[np.int64]
Shuffle = Callable[[int, int, int], Order]
"""(samples, seed, epoch) -> which sample stands at each position."""


LIMIT = 1e-4


def positions(start: int, stop: int) -> order.Array:
    return np.arange(start, stop, dtype=np.uint64)


def whole(samples: int, seed: int, epoch: int) -> Order:
    return shuffled(positions(0, samples), samples, seed, epoch).astype(np.int64)


@settings(deadline=None)
@given(samples=st.integers(1, 5_000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
@example(samples=65_536, seed=0, epoch=1)
@example(samples=100_003, seed=0, epoch=1)
@example(samples=4096, seed=2**63 - 1, epoch=7)  # on either side of where the rounds get fewer
@example(samples=4097, seed=2**63 - 1, epoch=7)
def test_each_sample_comes_once_and_any_position_can_be_asked_alone(samples: int, seed: int, epoch: int) -> None:
    together = whole(samples, seed, epoch)
    assert np.array_equal(np.sort(together), np.arange(samples))
    asked = np.random.default_rng(0).integers(0, samples, size=50).astype(np.uint64)  # any order, repeats too
    assert shuffled(asked, samples, seed, epoch).tolist() == together[asked].tolist()
    assert shuffled(asked[:1], samples, seed, epoch) == together[asked[0]]
    assert shuffled(asked[:0], samples, seed, epoch).tolist() == []


@pytest.mark.parametrize("samples", [100, 5000])
def test_every_epoch_and_every_seed_has_its_own_order(samples: int) -> None:
    orders = {tuple(whole(samples, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_orders_never_change() -> None:
    """A run continued with a newer Evenkeel must go on in the same order. Do not update these."""
    assert whole(10, seed=0, epoch=0).tolist() == [8, 6, 3, 1, 4, 9, 2, 0, 5, 7]
    assert whole(10, seed=0, epoch=1).tolist() == [6, 2, 7, 5, 0, 4, 8, 1, 3, 9]
    end = shuffled(positions(10**9 - 3, 10**9), 10**9, seed=42, epoch=3)
    assert end.tolist() == [294095060, 116848481, 185121219]


@pytest.mark.parametrize("samples", [10**9, 2**40 - 1, 2**62 + 1])
def test_huge_data_sets_have_distinct_samples_within_bounds(samples: int) -> None:
    ends = np.concatenate([positions(0, 2_000), positions(samples - 2_000, samples)])
    found = [int(sample) for sample in shuffled(ends, samples, 0, 0)]

    assert len(set(found)) == len(found)
    assert 0 <= min(found) <= max(found) < samples
    # 4,000 uniform draws leave the first and the last hundredth empty with a chance of 4e-18
    assert min(found) < samples / 100
    assert max(found) > samples * 0.99


def test_a_billion_samples_take_no_memory_and_no_building() -> None:
    shuffled(positions(0, 1), 2, 0, 0)
    tracemalloc.start()
    try:
        batch = shuffled(positions(500_000_000, 500_004_096), 10**9, seed=0, epoch=5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(batch) == 4096
    assert batch.nbytes <= peak < 1_000_000  # a permutation would take 8 GB; NumPy reports its arrays to tracemalloc


def test_batches_of_a_billion_samples_are_as_good_as_random_ones() -> None:
    values = billion()
    assert not suspicious(values), values


def p_value(chi_square: float, freedom: float) -> float:
    """How likely a chi-square at most so large is, for truly random orders."""
    return float(torch.special.gammainc(torch.tensor(freedom / 2).double(), torch.tensor(chi_square / 2).double()))


def chi_square(observed: Counter[int] | Counter[tuple[int, ...]], expected: dict[object, float]) -> float:
    assert set(observed) <= set(expected)
    return sum((observed[key] - mean) ** 2 / mean for key, mean in expected.items())  # type: ignore[index]


def favouritism(samples: int, seeds: int) -> float:
    """Probability, if all orders came equally often, of frequencies at least as uneven as over these seeds."""
    found = Counter(tuple(whole(samples, seed, epoch=0).tolist()) for seed in range(seeds))
    orders = list(permutations(range(samples)))
    return 1 - p_value(chi_square(found, dict.fromkeys(orders, seeds / len(orders))), len(orders) - 1)


@pytest.mark.parametrize(("samples", "seeds"), [(2, 400), (3, 1_000), (4, 1_000), (5, 1_800), (6, 3_600)])
def test_all_orders_of_few_samples_are_equally_likely(samples: int, seeds: int) -> None:
    assert favouritism(samples, seeds) > LIMIT


def even(found: Order) -> bool:
    """Whether an even number of swaps sorts it."""
    swaps, rest = 0, found.tolist()
    for i in range(len(rest)):
        while (j := rest[i]) != i:
            rest[i], rest[j] = rest[j], j
            swaps += 1
    return swaps % 2 == 0


@pytest.mark.parametrize("samples", [9, 25])  # squares of odd numbers: the tightest grid would have two odd sides
def test_odd_and_even_orders_are_equally_likely(samples: int) -> None:
    count = sum(even(whole(samples, seed, epoch=0)) for seed in range(600))
    assert abs(count - 300) < 4 * sqrt(600) / 2


SEEDS = 200


def by_count(counts: list[int], mean: float) -> float:
    """Are these counts those of independent rare events, so many on average (Poisson)?"""
    most = 5
    chance = [exp(-mean) * mean**k / factorial(k) for k in range(most)]
    expected = dict(enumerate(p * len(counts) for p in [*chance, 1 - sum(chance)]))
    return p_value(chi_square(Counter(min(count, most) for count in counts), expected), most)


def blocks(orders: list[Order]) -> float:
    """Do positions and samples, in ten blocks each, mix in every single order? Scattered too well is wrong too."""
    total, samples = 0.0, len(orders[0])
    for found in orders:
        table = np.zeros((10, 10))
        np.add.at(table, (np.arange(samples) * 10 // samples, found * 10 // samples), 1)
        mean = samples / 100
        total += ((table - mean) ** 2 / mean).sum() * (samples - 1) / samples  # both margins are fixed
    return p_value(total, 81 * len(orders))


def places(orders: list[Order]) -> float:
    """Is every sample equally likely at a position? First and last positions, and some within."""
    samples, mean = len(orders[0]), len(orders) / 10
    at = [0, 1, 31, 32, samples // 2 - 1, samples - 2, samples - 1]
    total = 0.0
    for position in at:
        found = Counter(int(o[position]) * 10 // samples for o in orders)
        total += chi_square(found, dict.fromkeys(range(10), mean))
    return p_value(total, 9 * len(at))


def fixed_points(orders: list[Order]) -> float:
    """Do samples stay at their own position as often as chance has it, once an order on average?"""
    return by_count([int((o == np.arange(len(o))).sum()) for o in orders], mean=1)


def adjacent(orders: list[Order]) -> float:
    """Do neighbours in the data set stay neighbours as often as chance has it, two pairs an order?"""
    return by_count([int((np.abs(np.diff(o)) == 1).sum()) for o in orders], mean=2)


def correlated(pairs: list[tuple[Order, Order]]) -> float:
    """Are two sequences unrelated in every pair of them?"""
    squares = sum(float(np.corrcoef(a, b)[0, 1]) ** 2 * (len(a) - 1) for a, b in pairs)
    return p_value(squares, len(pairs))


def neighbours(orders: list[Order]) -> float:
    """Is a sample unrelated to the next one?"""
    return correlated([(o[:-1], o[1:]) for o in orders])


STATISTICS = {f.__name__: f for f in (blocks, places, fixed_points, adjacent, neighbours)}


def epochs(orders: list[Order]) -> float:
    """Is an epoch's order unrelated to the next one's?"""
    return correlated(list(pairwise(orders)))


def judged(shuffle: Shuffle, samples: int) -> dict[str, float]:
    """The statistics of many orders that differ in their seeds, and of many that differ in their epochs."""
    by_seed = [shuffle(samples, seed, 0) for seed in range(SEEDS)]
    by_epoch = [shuffle(samples, 0, epoch) for epoch in range(SEEDS)]
    values = {name: statistic(by_seed) for name, statistic in STATISTICS.items()}
    values |= {f"{name} by epoch": statistic(by_epoch) for name, statistic in STATISTICS.items()}
    return values | {"epochs": epochs(by_epoch)}


def suspicious(values: dict[str, float]) -> set[str]:
    return {name for name, value in values.items() if not LIMIT < value < 1 - LIMIT}


def fisher_yates(samples: int, seed: int, epoch: int) -> Order:
    return np.random.default_rng((seed, epoch)).permutation(samples)


def affine(samples: int, seed: int, epoch: int) -> Order:
    rng = np.random.default_rng((seed, epoch))
    factor = rng.choice(np.flatnonzero(np.gcd(np.arange(samples), samples) == 1))
    return (factor * np.arange(samples) + rng.integers(samples)) % samples


def rotation(samples: int, seed: int, epoch: int) -> Order:
    return np.roll(np.arange(samples), np.random.default_rng((seed, epoch)).integers(samples))


def shuffle_buffer(samples: int, seed: int, epoch: int) -> Order:
    """What streaming loaders do: shuffled within a window only."""
    window = 200
    found = np.arange(samples).reshape(-1, window)
    return np.random.default_rng((seed, epoch)).permuted(found, axis=1).reshape(-1)


def one_cycle(samples: int, seed: int, epoch: int) -> Order:
    """What the classical slip in Fisher-Yates makes (Sattolo's algorithm): no sample ever keeps its place."""
    cycle = fisher_yates(samples, seed, epoch)
    found = np.empty_like(cycle)
    found[cycle] = np.roll(cycle, 1)
    return found


@pytest.mark.parametrize(
    ("shuffle", "samples"), [(whole, 1000), (whole, 5000), (fisher_yates, 1000)]
)  # on either side of where the rounds get fewer; and a true shuffle
def test_orders_are_as_good_as_random_ones(shuffle: Shuffle, samples: int) -> None:
    values = judged(shuffle, samples)
    assert not suspicious(values), values


@pytest.mark.parametrize(
    ("weak", "rejected_by"),
    [
        (affine, {"blocks", "adjacent"}),
        (rotation, {"blocks", "adjacent", "fixed_points", "neighbours"}),
        (shuffle_buffer, {"blocks", "places", "adjacent", "neighbours"}),
        (one_cycle, {"fixed_points"}),
        (lambda samples, seed, _epoch: fisher_yates(samples, seed, 0), {"epochs"}),  # the same in every epoch
    ],
)
def test_the_statistics_reject_a_weak_shuffle(weak: Shuffle, rejected_by: set[str]) -> None:
    values = judged(weak, 1000)
    assert rejected_by <= suspicious(values), values


def billion() -> dict[str, float]:
    """The first 50 global batches of 4,096 out of 10^9: spread, and relations of neighbours on the grid."""
    samples, columns = 10**9, 31_623  # the square root, rounded up
    batches = [shuffled(positions(b * 4096, (b + 1) * 4096), samples, 0, 0).astype(np.int64) for b in range(50)]
    below = [shuffled(positions(b * 4096, (b + 1) * 4096) + np.uint64(columns), samples, 0, 0) for b in range(50)]
    even = dict.fromkeys(range(64), 4096 / 64)
    spread = sum(chi_square(Counter((batch * 64 // samples).tolist()), even) for batch in batches)
    return {
        "spread": p_value(spread, 63 * len(batches)),
        "neighbours": neighbours(batches),
        "above each other": correlated(list(zip(batches, below, strict=True))),
    }


@pytest.mark.parametrize(("rounds", "samples"), [(8, 6), (2, 1000), (4, 1000), (2, 10**9)])
def test_the_statistics_reject_too_few_rounds(rounds: int, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_rounds", lambda _samples: rounds)
    if samples == 6:
        assert favouritism(6, 3_600) < 1e-9, "some orders come more often"
    elif samples == 1000:
        assert "adjacent" in suspicious(judged(whole, 1000))
    else:
        assert suspicious(billion())

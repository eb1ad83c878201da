"""Shares by speed: the best division, and decisions that noise does not move. Real ranks: tests/promises."""

import itertools
import logging
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.training import balance
from evenkeel.training.balance import EVERY, Balance, apportioned


def divided(text: str, ranks: int = 2, micro_batches: int = 8) -> Balance:
    """On rank 0."""
    plan = Plan.by_count(samples=64, global_batch=64, micro_batches=micro_batches, epochs=1)
    world = World(0, 0, ranks, ranks, torch.device("cpu"), launched=True)
    return Balance(Config(shares=text), plan, world)


@given(st.integers(0, 5), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_no_division_is_done_sooner(more: int, seconds: list[int]) -> None:
    count = len(seconds) + more
    sizes = apportioned(count, seconds)
    assert sum(sizes) == count
    assert min(sizes) >= 1
    others = itertools.product(range(1, count + 1), repeat=len(seconds))
    best = min(longest(other, seconds) for other in others if sum(other) == count)
    assert longest(sizes, seconds) == best


def longest(sizes: tuple[int, ...], seconds: list[int]) -> int:
    return max(size * each for size, each in zip(sizes, seconds, strict=True))


def changes(it: Balance, seconds: list[float], steps: int, noise: float, dice: random.Random) -> int:
    """How often the shares change in so many steps, where a micro-batch takes a rank these seconds, and noise."""
    found = 0
    for _ in range(steps // EVERY):
        taken = [each * dice.gauss(1, noise) for each in seconds]
        rows = [[0.0, t * n * EVERY, 0.0, n * EVERY, 0, EVERY] for t, n in zip(taken, it.per_rank, strict=True)]
        it.take(rows)
        before, it.per_rank = it.per_rank, it.wanted()
        found += it.per_rank != before
    return found


@pytest.mark.parametrize("ratio", [1.0, 1.2, 1.5, 1.67, 2.0, 3.0, 5.0])
def test_they_follow_the_speed_once_and_noise_moves_nothing(ratio: float) -> None:
    it, dice = divided("auto"), random.Random(0)
    assert it.per_rank == (4, 4)
    assert changes(it, [1.0, ratio], 2000, 0.05, dice) <= 2
    best = longest(apportioned(8, [1.0, ratio]), [1.0, ratio])  # type: ignore[list-item]
    assert longest(it.per_rank, [1.0, ratio]) <= balance.GAIN * best  # type: ignore[list-item]
    assert changes(it, [1.0, 1.0], 2000, 0.05, dice) <= 2
    assert it.per_rank == (4, 4) or ratio < 1.5, "a rank that recovers gets its share back"


def test_the_control_without_hysteresis_noise_moves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "GAIN", 1.0)
    monkeypatch.setattr(balance, "TIMES", 1)
    assert changes(divided("auto"), [1.0, 2.0], 2000, 0.05, random.Random(0)) > 10


def test_typed_shares_hold_and_what_cannot_be_divided_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert divided("3:1").per_rank == (6, 2)
        assert divided("equal", micro_batches=2).per_rank == (1, 1)
    assert not caplog.messages
    assert divided("3:1", ranks=3).per_rank == (3, 3, 2)
    assert "is for 2 processes, but there are 3" in caplog.messages[-1]
    assert divided("3:1", micro_batches=2).per_rank == (1, 1)
    assert "2 micro-batches for 2 processes" in caplog.messages[-1]
    assert "--micro-batches 4" in caplog.messages[-1]
    assert divided("auto", micro_batches=2).per_rank == (1, 1)
    assert "--micro-batches 8" in caplog.messages[-1]

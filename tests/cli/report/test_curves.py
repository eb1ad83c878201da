"""Curves that are thinned out keep what the eye looks for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.cli.report.figures import MOST, _curves, _place, smoothed, thinned
from evenkeel.cli.report.history import Curve
from evenkeel.cli.report.theme import SMALL

FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1, max_size=400), st.integers(10, 50))
def test_ends_and_extremes_stay(values: list[float], most: int) -> None:
    steps, kept = thinned(range(len(values)), values, most)
    assert len(steps) <= max(most, 4)
    assert (steps[0], steps[-1], kept[0], kept[-1]) == (0, len(values) - 1, values[0], values[-1])
    assert (kept.min(), kept.max()) == (min(values), max(values))
    assert (np.diff(steps) > 0).all()
    assert all(values[int(step)] == value for step, value in zip(steps, kept, strict=True))


@given(st.lists(FLOATS, min_size=1, max_size=300))
def test_smoothing_stays_within_the_values(values: list[float]) -> None:
    smooth = smoothed(values)
    assert len(smooth) == len(values)
    assert min(values) - 1e-6 <= smooth.min() <= smooth.max() <= max(values) + 1e-6


def test_smoothing_is_the_mean_around() -> None:
    assert set(smoothed([0.001] * 100_000)) == {0.001}
    values = np.random.default_rng(0).normal(size=1000)
    smooth = smoothed(values)
    assert np.allclose([smooth[500], smooth[0]], [values[480:521].mean(), values[:21].mean()])


def test_a_long_curve_with_one_spike() -> None:
    values = np.zeros(1_000_000)
    values[123_456] = 1.0
    steps, kept = thinned(range(len(values)), values)
    assert len(steps) <= MOST
    assert steps[kept.argmax()] == 123_456
    every = np.linspace(0, len(values) - 1, MOST).astype(int)
    assert values[every].max() == 0, "the control: taking each n-th point loses it"


def test_learning_rates_of_several_optimizers_are_named_and_stand_together() -> None:
    curve = Curve()
    curve.add(1, 0.1)
    lines = [("train", curve, 0, True)]
    names = ["mine", "lr_critic", "samples_per_s", "lr", "lr_2"]
    assert sorted(names, key=lambda name: _place(name, lines)) == ["lr", "lr_2", "lr_critic", "samples_per_s", "mine"]
    titles = [_curves(name, lines, SMALL).title for name in ("lr", "lr_critic", "lr_2", "lrx")]
    assert titles == ["Learning rate", "Learning rate (critic)", "Learning rate (2)", "Lrx"]

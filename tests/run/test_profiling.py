"""The clocks of ranks, measured by meetings; and the table of operators."""

import random

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from evenkeel.run.profiling import clocks_ahead, operators


def test_a_clock_that_is_ahead_is_found_beneath_late_wake_ups() -> None:
    draw, second = random.Random(3), 10**9
    moments = [number * 10**6 for number in range(15)]
    late = [[draw.expovariate(1 / 50_000) + (draw.random() < 0.2) * 10**7 for _ in moments] for _ in range(3)]
    stamps = [[round(at + by) for at, by in zip(moments, each, strict=True)] for each in late]
    stamps[2] = [at + 5 * second for at in stamps[2]]
    first, same_host, other = clocks_ahead(stamps, ["a", "a", "b"])
    assert first == same_host == 0, "ranks of a host have one clock, whatever they have measured"
    assert abs(other - 5 * second) < 200_000
    mean = sum(b - a for a, b in zip(stamps[0], stamps[2], strict=True)) / 15
    assert abs(mean - 5 * second) > 200_000, "the control: the mean is moved by a rank that woke up late"


def test_operators_are_in_order_and_spans_are_none() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found, record_function("step 1"):
        torch.ones(300, 300) @ torch.ones(300, 300)
    lines = operators(found.key_averages(), 3).splitlines()
    assert len(lines) == 4
    shares = [float(line.split()[-2].rstrip("%")) for line in lines[1:]]
    assert shares == sorted(shares, reverse=True)
    assert "aten::mm" in operators(found.key_averages(), 50)
    assert "step 1" not in operators(found.key_averages(), 50)

#!/usr/bin/env python3
"""What the order of samples costs: `evenkeel.data.shuffle.shuffled` beside `torch.randperm`.

    python benchmarks/order.py

Prints the median time in which one process finds the samples of a global batch of 4,096 (a rank of W needs a W-th of
them), and for a data set of ImageNet's size how that compares with `torch.randperm(N)`, which yields the whole epoch
at once but must be held in memory by every rank, and drawn again after every restart.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from evenkeel.data.shuffle import shuffled

GLOBAL_BATCH = 4096
IMAGENET = 1_300_000
BILLION = 10**9


def milliseconds(work: Callable[[int], object], repeats: int) -> float:
    """Median time of ``work(0)``, ``work(1)``, ... after three calls to warm up."""
    for i in range(3):
        work(i)
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def batch(samples: int, step: int) -> object:
    """The samples of one global batch of epoch 0."""
    start = step * GLOBAL_BATCH
    return shuffled(np.arange(start, start + GLOBAL_BATCH, dtype=np.uint64), samples, seed=0, epoch=0)


def peak_megabytes(work: Callable[[], object]) -> float:
    """Most memory that NumPy and Python held at a time during ``work()``."""
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)  # as under torchrun
    print(f"{'N':>13}  {'ms per global batch':>19}  {'peak MB':>7}")
    cost = {}
    for samples in (BILLION, IMAGENET):
        cost[samples] = milliseconds(lambda step, n=samples: batch(n, step), repeats=200)  # type: ignore[misc]
        megabytes = peak_megabytes(lambda n=samples: batch(n, step=0))  # type: ignore[misc]
        print(f"{samples:>13,}  {cost[samples]:>19.3f}  {megabytes:>7.2f}")

    randperm = milliseconds(lambda _: torch.randperm(IMAGENET), repeats=20)
    megabytes = torch.randperm(IMAGENET).nbytes / 1e6
    steps = -(-IMAGENET // GLOBAL_BATCH)
    print(f"\ntorch.randperm({IMAGENET:,}): {randperm:.1f} ms and {megabytes:.1f} MB for an epoch of {steps} steps")
    print(f"one global batch / randperm:     {cost[IMAGENET] / randperm:.3f}  (what a resume waits for)")
    print(f"a whole epoch / randperm:        {cost[IMAGENET] * steps / randperm:.1f}  (all batches on a single rank)")
    print(f"torch.randperm({BILLION:,}) would take {BILLION * 8 / 1e9:.0f} GB on every rank")


if __name__ == "__main__":
    main()

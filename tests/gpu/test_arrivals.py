"""When a rank is ready, by events of the GPU that nobody waits for; and MFU's factor."""

from __future__ import annotations

import time

import torch
from torch import nn

from evenkeel.config import Config
from evenkeel.data.plan import MicroBatch
from evenkeel.distributed.world import World
from evenkeel.training.arrivals import BACKWARD, DATA, FORWARD, STEPS, Arrivals
from evenkeel.training.flops import peak, per_sample
from tests.training.test_flops import BATCH, Mine

WORLD = World(0, 0, 2, 2, torch.device("cuda", 0), launched=True)
CYCLES = 500_000_000


def test_the_stream_is_timed_and_the_host_does_not_wait() -> None:
    it = Arrivals(WORLD)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    it.begin([MicroBatch(0, 0, 0, 4)])
    it.mark(DATA)
    torch.cuda._sleep(CYCLES)
    it.mark(FORWARD)
    it.mark(BACKWARD)
    it._add_up()
    assert it._row[STEPS] == 0, "the GPU is at it"
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    it._add_up()
    assert it._row[STEPS] == 1
    assert it._row[DATA] + it._row[BACKWARD] < it._row[FORWARD] <= took


def test_mfu_is_known_where_the_peak_is() -> None:
    model = nn.Linear(10, 3).to(WORLD.device)
    found = per_sample(Mine(), model, BATCH, 4, Config(), WORLD)
    assert ("mfu" in found) == bool(peak(torch.cuda.get_device_name(), "fp32"))
    assert all(value > 0 for value in found.values())

"""Memory that runs out: what is said, how a run goes on, and the micro-batch that fits."""

from __future__ import annotations

import re

import pytest
import torch

from evenkeel.config import Config
from evenkeel.distributed.world import World
from evenkeel.training.batch_size_finder import Probe
from evenkeel.training.oom import explained, note_batch
from evenkeel.training.optimization import build_optimizer
from evenkeel.training.state import State
from tests.support.small_gpu_task import Wide


def test_a_gpu_that_is_full_tells_what_is_held_by_whom() -> None:
    device = torch.device("cuda", 0)
    held = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    torch.cuda.set_per_process_memory_fraction(0.05, device)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(torch.cuda.get_device_properties(device).total_memory // 10, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    note_batch(caught.value, held[:8].view(2, 4))
    text = explained(caught.value, device, Config(batch_size=8, micro_batch=2))
    print(text)
    for part in (
        "out of memory on rank 0 (cuda:0 (",
        "GiB more were requested",
        "the batch was [2, 4] uint8",
        "in tensors",
    ):
        assert part in text
    assert re.search(r"of [\d.]+ GiB this process has [\d.]+ GiB", text)
    assert "--micro-batch 1 instead of 2" in text


def test_the_probe_stays_below_a_gpus_limit_and_gives_its_memory_back() -> None:
    device = torch.device("cuda", 0)
    world = World(0, 0, 1, 1, device, launched=False)
    task, config = Wide(), Config(batch_size=64, micro_batch="auto")
    model = task.model().to(device)
    state = State(model, [build_optimizer(model.parameters(), config)])
    whole = torch.cuda.get_device_properties(device).total_memory
    _ = torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # cuBLAS keeps what it takes the first time
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.set_per_process_memory_fraction(0.03 + 1.5 * 2**30 / whole, device)
    try:
        found, said = Probe(config, task, world, task.train_dataset(), state)()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    print(said)
    assert 1 <= found < 64
    assert re.search(r"and 64\b.* did not", said)
    assert torch.cuda.memory_allocated(device) == before

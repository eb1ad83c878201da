"""Batches to the device: as they were on the CPU, and on a GPU while it computes."""

from __future__ import annotations

import time

import pytest
import torch

from evenkeel.data.batch import to_device
from evenkeel.distributed.transfer import Transfer
from tests.distributed.test_transfer import batch, values

BUSY = 2_000_000_000
"""Cycles that the compute stream spins for: about a second."""


@pytest.mark.parametrize("on_its_own", [True, False])
def test_a_batch_arrives_while_the_one_before_is_computed(on_its_own: bool) -> None:
    """The control is `to_device`, whose copy waits for the computation."""
    device = torch.device("cuda", 0)
    transfer, tensor = Transfer(device), torch.ones(1000, 1000).pin_memory()
    transfer(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    moved = transfer(tensor) if on_its_own else to_device(tensor, device)
    arrived = torch.cuda.Event()
    arrived.record(transfer._stream if on_its_own else None)
    while not (arrived.query() or torch.cuda.current_stream().query()):
        pass
    time.sleep(0.02)  # a stream ends a moment after its last event
    assert torch.cuda.current_stream().query() is not on_its_own
    assert moved.sum().item() == 1_000_000


def test_no_batch_is_overwritten_by_a_later_one() -> None:
    transfer, sums = Transfer(torch.device("cuda", 0)), []
    for number in range(200):
        moved = transfer(batch(float(number)))
        torch.cuda._sleep(1_000_000)  # the host runs ahead
        sums.append(moved["both"].image.mean())
        del moved
    assert torch.stack(sums).tolist() == list(range(200))
    assert values(transfer(batch(3.0))) == [3.0] * 3

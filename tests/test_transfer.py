"""Batches to the device: as they were on the CPU, and on a GPU while it computes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from evenkeel.data import to_device
from evenkeel.transfer import Transfer

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BUSY = 2_000_000_000
"""Cycles that the compute stream spins for: about a second."""


@dataclass(frozen=True)
class Both:
    image: Tensor
    name: str


def batch(value: float) -> Any:
    packed = torch.nn.utils.rnn.pack_sequence([torch.full((2,), value)])
    others = UserDict(x=[torch.tensor(value), packed, None])
    return {"both": Both(torch.full((300, 300), value), "name"), "others": others}


def values(moved: Any) -> list[float]:
    single, packed, nothing = moved["others"]["x"]
    assert (type(moved["both"]), moved["both"].name, type(moved["others"]), nothing) == (Both, "name", UserDict, None)
    return [moved["both"].image.mean().item(), single.item(), packed.data.mean().item()]


def test_on_the_cpu_nothing_is_copied() -> None:
    given = batch(2.0)
    moved = Transfer(torch.device("cpu"))(given)
    assert values(moved) == [2.0] * 3
    assert moved["both"].image.data_ptr() == given["both"].image.data_ptr()


def test_a_batch_with_a_to_of_its_own_is_not_waited_for_if_it_can_do_that() -> None:
    asked: list[Any] = []

    class Plain:
        def to(self, device: torch.device) -> Plain:
            asked.append(device)
            return self

    class Ahead:
        def to(self, device: torch.device, *, non_blocking: bool = False) -> Ahead:
            asked.append(non_blocking)
            return self

    class Passing:
        def to(self, *where: Any, **how: Any) -> Passing:
            asked.append(how)
            return self

    cpu = torch.device("cpu")
    to_device([Plain(), Ahead(), Passing()], cpu)
    assert asked == [cpu, True, {"non_blocking": True}]


@pytest.mark.gpu
@needs_a_gpu
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
    assert torch.cuda.current_stream().query() is not on_its_own
    assert moved.sum().item() == 1_000_000


@pytest.mark.gpu
@needs_a_gpu
def test_no_batch_is_overwritten_by_a_later_one() -> None:
    transfer, sums = Transfer(torch.device("cuda", 0)), []
    for number in range(200):
        moved = transfer(batch(float(number)))
        torch.cuda._sleep(1_000_000)  # the host runs ahead
        sums.append(moved["both"].image.mean())
        del moved
    assert torch.stack(sums).tolist() == list(range(200))
    assert values(transfer(batch(3.0))) == [3.0] * 3

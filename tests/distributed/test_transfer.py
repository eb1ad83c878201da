"""Batches to the device: as they were on the CPU, and on a GPU while it computes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenkeel.data.batch import to_device
from evenkeel.distributed.transfer import Transfer


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

    class Passing:
        def to(self, *where: Any, **how: Any) -> Passing:
            asked.append(how)
            return self

    to_device([Plain(), Passing()], torch.device("cpu"))
    assert asked == [torch.device("cpu"), {"non_blocking": True}]

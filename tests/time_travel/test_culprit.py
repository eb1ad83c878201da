"""The first operation whose result is not finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenkeel.time_travel.culprit import Culprit, Finder, watched_modules


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def culprit(model: nn.Module, x: Tensor) -> Culprit | None:
    with watched_modules(model, lambda *_: None) as computing, Finder(len(x), [__file__], computing) as finder:
        model(x).sum().backward()
    return finder.found


def test_it_is_named_with_module_line_and_rows() -> None:
    model = nn.Sequential(nn.Identity(), Log(), nn.Linear(2, 1))
    found = culprit(model, torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]]))
    assert found
    assert (found.operation, found.module, found.value, found.rows) == ("aten.log", "1", "nan", (1,))
    assert found.line.endswith("return x.log()")
    assert not found.given


def test_nan_counts_before_an_earlier_infinity_which_a_mask_may_mean() -> None:
    found = culprit(nn.Sequential(Log(), nn.Softmax(1)), torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True))
    assert found
    assert (found.module, found.value, found.rows) == ("1", "nan", (1,))
    assert found.given, "the infinity went in"


def test_the_control_finite_arithmetic_has_none() -> None:
    assert culprit(nn.Sequential(Log(), nn.Linear(2, 1)), torch.ones(3, 2)) is None


def test_a_gradient_that_is_not_finite_is_found_in_the_backward_pass() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sqrt()

    found = culprit(Root(), torch.ones(3, 2))
    assert found
    assert (found.value, found.module) == ("inf", "")

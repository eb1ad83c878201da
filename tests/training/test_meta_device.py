"""Which models can be built on the meta device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel.common.errors import Refusal
from evenkeel.training.meta_device import built_on_meta, materialise
from tests.training.test_sharding import Usual

KEPT: list[Any] = []


def built(change: Callable[[Any], object] = lambda _: None, optimize: Callable[[Any], object] = lambda _: None) -> Any:
    class Changed(Usual):
        def model(self) -> nn.Module:
            model = super().model()
            change(model)
            return model

    model, reason = built_on_meta(Changed(), optimize, Changed().model)
    assert reason == "" or not any(parameter.is_meta for parameter in model.parameters())
    return reason or model


def test_tied_parameters_stay_one_object_and_get_memory_in_place() -> None:
    model = built(lambda it: setattr(it["first"], "bias", it["blocks"][0][0].bias))
    weight, bias = model["first"].weight, model["first"].bias
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert weight.is_meta
    assert bias.is_meta
    bias.mark = "stays"
    materialise(bias, torch.device("cpu"))
    assert model["first"].bias is model["blocks"][0][0].bias is bias is optimizer.param_groups[0]["params"][1]
    assert (bias.device.type, bias.mark, weight.device.type) == ("cpu", "stays", "meta")
    values = bias.data
    materialise(bias, torch.device("cpu"))
    assert bias.data_ptr() == values.data_ptr(), "it has memory already"


def test_buffers_have_memory_and_what_else_refers_to_them() -> None:
    def change(model: Any) -> None:
        model.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)
        model.alias = model.mask

    model = built(change)
    assert model.mask.device.type == "cpu"
    assert model.alias is model.mask
    assert model.mask.count_nonzero() == 0, "rank 0 sends the values"


def tied_view(model: Any) -> None:
    model.view = model["first"].weight[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda it: torch.ones(1).tolist(), "NotImplementedError: Cannot copy out of meta tensor"),
        (lambda it: bool(it["first"].weight.sum() > 0), "RuntimeError: Tensor.item() cannot be called on meta"),
        (lambda it: nn.init.normal_(torch.empty(2, device="cpu")), "random numbers are drawn on the CPU"),
        (lambda it: nn.init.normal_(torch.Tensor(2)), "random numbers are drawn on the CPU"),
        (lambda it: setattr(it, "scale", torch.ones(2, 3)), "a tensor of shape [2, 3] is no parameter or buffer"),
        (tied_view, "a tensor of shape [4] is no parameter or buffer"),
        (lambda it: it.register_buffer("s", torch.ones(2, 2, device="cpu").to_sparse()), "a buffer is not dense"),
    ],
)
def test_what_cannot_be_built_there(change: Callable[[Any], object], reason: str) -> None:
    found = built(change)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_what_is_stored_for_the_next_call_is_refused() -> None:
    before = [torch.ones(6, device="meta")]  # does not count
    with pytest.raises(Refusal, match=r"model\(\) of Changed stores a tensor of shape \[5\] outside of the model"):
        built(lambda it: KEPT.append(torch.ones(5)))
    KEPT.clear()
    assert isinstance(built(), nn.Module)
    assert before[0].is_meta


def test_nor_what_its_optimizers_cannot_be_built_for() -> None:
    assert "meta tensors" in built(optimize=lambda it: it["first"].weight.norm().item())
    assert isinstance(built(optimize=lambda it: torch.optim.AdamW(it.parameters(), fused=True)), nn.Module)


def test_a_cycle_that_is_yet_to_be_freed_is_no_reason() -> None:
    def change(_: Any) -> None:
        cycle: list[Any] = [torch.ones(2)]
        cycle.append(cycle)

    assert isinstance(built(change), nn.Module)

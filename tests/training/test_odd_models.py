"""Odd models: each trains, is captured and loads again, or is refused or ended in a line before the first step."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import LBFGS, SGD

from evenkeel.common.errors import Ended, Refusal
from evenkeel.data.plan import Plan
from evenkeel.training.checks import check_model, checked_optimizers
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.state import State
from tests.support.steps import passes
from tests.training.test_gradients import ALONE


class WithInteger(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.order = nn.Parameter(torch.arange(3), requires_grad=False)


class OneOfTwo(nn.Module):
    """Two networks, of which the loss uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.used(x)


class WithMore(nn.Linear):
    """Its state dict has more than tensors."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class WithEmptyBuffer(nn.Linear):
    """A cache, say, that is filled elsewhere; it has no other buffer."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("cache", torch.empty(0))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def made_lazily() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    model(torch.zeros(2, 3))
    return model


def quantised() -> nn.Module:
    quantization: Any = torch.ao.quantization
    inner = nn.Sequential(nn.Linear(3, 4))
    return nn.Sequential(quantization.quantize_dynamic(inner, {nn.Linear}), nn.Linear(4, 2))


def fake_quantised(called: bool = True) -> nn.Module:
    quantization: Any = torch.ao.quantization
    made: Any = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    made.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model: nn.Module = quantization.prepare_qat(made.train())
    if called:
        model(torch.ones(2, 3))
    return model


def sgd(model: nn.Module) -> Any:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


MODELS: list[tuple[Callable[[], nn.Module], Callable[[Any], Any], str]] = [
    (WithInteger, sgd, ""),
    (WithEmptyBuffer, sgd, ""),
    (lambda: parametrizations.weight_norm(nn.Linear(3, 2)), sgd, ""),
    (lambda: parametrizations.orthogonal(nn.Linear(3, 2)), sgd, ""),
    (lambda: parametrizations.spectral_norm(nn.Linear(3, 2)), sgd, ""),
    (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), sgd, ""),
    (tied, sgd, ""),
    (made_lazily, sgd, ""),
    (lambda: nn.LazyLinear(2), sgd, "a LazyLinear whose weight has no shape yet: call it once in model() with a batch"),
    (fake_quantised, sgd, ""),
    (lambda: fake_quantised(called=False), sgd, "changes its shape in training, from [1] to [4]: give it its final"),
    (quantised, sgd, "_packed_params.dtype, a dtype, but checkpoints have dense tensors only: train it first and"),
    (WithMore, sgd, "has _extra_state, a dict, but checkpoints have dense tensors only: return a tensor from get_"),
    (OneOfTwo, sgd, "2 of the model's 4 parameters got no gradient: other.weight, other.bias; use them in the loss"),
    (lambda: nn.Linear(3, 2), lambda m: LBFGS(m.parameters()), "a LBFGS, whose step() needs a closure: use another"),
]


@pytest.mark.filterwarnings("ignore")  # torch deprecates its own ways
@pytest.mark.parametrize(("make", "optimizer", "expected"), MODELS)
def test_trained_or_explained(make: Callable[[], nn.Module], optimizer: Callable[[Any], Any], expected: str) -> None:
    plan = Plan(8, global_batch=4, micro_batch=2, epochs=2)
    batches = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))

    def begun() -> State:
        torch.manual_seed(0)
        check_model(model := make())
        return State(model, checked_optimizers(optimizer(model), model))

    def trained(state: State, steps: range) -> State:
        learner = DistributedLoss(lambda network, batch: network(batch).square().mean(), state, ALONE, plan)
        for step in steps:
            passes(learner, step, plan.micro_batches(step), batches[step % 2 * 2 : step % 2 * 2 + 2])
            learner.step()
        return state

    with pytest.raises((Refusal, Ended)) if expected else nullcontext() as told:
        whole = trained(begun(), range(4))
    if told:
        assert expected in str(told.value)
        assert "\n" not in str(told.value)
        return
    resumed = begun()
    resumed.restore(trained(begun(), range(2)).capture())
    assert trained(resumed, range(2, 4)).step == 4
    found, others = (state.model.state_dict() for state in (whole, resumed))
    assert all(found[name].equal(others[name]) for name in found)
    assert any(not found[name].equal(value) for name, value in begun().model.state_dict().items()), "it has learned"


def test_integers_that_do_not_learn_have_no_average() -> None:
    state = State(model := WithInteger(), [sgd(model)], ema=0.9)
    for parameter in (model.weight, model.bias):
        parameter.grad = torch.ones_like(parameter)
    state.commit(torch.tensor(1.0))
    assert torch.equal(state.best_model.order, model.order)
    assert not torch.equal(state.best_model.weight, model.weight)

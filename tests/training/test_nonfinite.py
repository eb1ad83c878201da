"""A step whose loss or gradient is not finite: left out or the end, alike on all ranks, and never in the weights."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from evenkeel.config import Config
from evenkeel.training.nonfinite import NonFinite, decide, step_unless
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.precision import FLOOR, Scaler
from evenkeel.training.state import State
from evenkeel.training.state_dicts import sha256

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "ours, adamw": lambda p: build_optimizer(p, Config(optimizer="adamw")),
    "ours, adam": lambda p: build_optimizer(p, Config(optimizer="adam")),
    "ours, sgd": lambda p: build_optimizer(p, Config(optimizer="sgd")),
    "a user's own": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize(
    ("norm", "loss", "scale", "decided"),
    [
        (1.0, 1.0, 2.0, (False, False, False)),
        (math.inf, 1.0, 2.0, (True, True, False)),
        (math.inf, 1.0, FLOOR, (True, False, True)),
        (math.nan, math.nan, 2.0, (True, False, True)),
        (math.nan, 1.0, None, (True, None, True)),
    ],
    ids=["finite", "too large for float16", "too large for the smallest scale", "a bad loss", "without a scale"],
)
def test_what_becomes_of_a_step(
    norm: float, loss: float, scale: float | None, decided: tuple[bool, bool | None, bool]
) -> None:
    """The rows of `Decision`: not finite, overflow, failed."""
    scaler = Scaler(torch.device("cpu"), scale) if scale else None
    it = decide(torch.tensor(norm), torch.tensor(loss), scaler, [], by_host=False)
    overflow = None if it.overflow is None else bool(it.overflow)
    assert (bool(it.nonfinite), overflow, bool(it.failed)) == decided
    assert it.skip is decided[0], "a bool: on a CPU the host decides"


def take(state: State, gradient: float) -> None:
    """One step with the same number everywhere in the gradient, and a new value of the buffers."""
    state.clear_gradients()
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    buffers = [group.committed + gradient for group in state.buffers.groups]
    state.commit(clip_grad_norm(state.parameters, 0.0), buffers)


def everything(state: State) -> str:
    captured = state.capture()
    tensors: dict[str, Tensor] = dict(captured["model"])
    for i, (parameter, values) in enumerate(captured["optimizers"][0]["state"].items()):
        tensors |= {f"{i} {parameter} {name}": v for name, v in values.items() if isinstance(v, Tensor)}
    return sha256(tensors)


def new_state(optimizer: str, skip: bool) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    return State(model, [OPTIMIZERS[optimizer](list(model.parameters()))], skip_nonfinite=skip)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("good_before", [0, 2])
def test_a_skipped_step_changes_nothing_but_the_count(optimizer: str, bad: float, good_before: int) -> None:
    with_bad, without = new_state(optimizer, skip=True), new_state(optimizer, skip=True)
    for state in (with_bad, without):
        for _ in range(good_before):
            take(state, 0.5)
    take(with_bad, bad)
    assert (with_bad.step, with_bad.skipped, with_bad.last_skipped) == (good_before + 1, 1, good_before + 1)
    if good_before:
        assert everything(with_bad) == everything(without)
    for state in (with_bad, without):
        take(state, 0.25)
    assert everything(with_bad) == everything(without), "nor does anything of it come back later"


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_fused_sgd_takes_the_steps_that_torch_takes(dampening: float) -> None:
    """torch does not dampen the first gradient of a parameter, but would add it to a momentum of zero."""
    ours, torchs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    kwargs: dict[str, Any] = {"lr": 0.25, "momentum": 0.5, "dampening": dampening, "fused": True}
    for parameter, take_step in ((ours, partial(step_unless, False)), (torchs, SGD.step)):
        optimizer = SGD([parameter], **kwargs)
        for gradient in (1.0, 3.0):
            parameter.grad = torch.full_like(parameter, gradient)
            take_step(optimizer)
    assert torch.equal(ours, torchs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stop_leaves_the_state_of_the_step_before(optimizer: str) -> None:
    state = new_state(optimizer, skip=False)
    take(state, 0.5)
    before = everything(state)
    with pytest.raises(NonFinite, match="step 2 is not finite"):
        take(state, math.nan)
    assert state.step == 1
    assert state.capture()["step"] == 1
    assert everything(state) == before
    take(state, 0.5)
    assert state.step == 2


def test_the_control_an_optimizer_by_itself_takes_the_poison() -> None:
    for optimizer in (SGD, Adam, AdamW):
        model = nn.Linear(3, 3)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        optimizer(model.parameters(), lr=0.1).step()
        assert not model.weight.isfinite().any()


def test_clip_gives_the_norm_and_scales_only_on_request() -> None:
    model = nn.Linear(1, 2, bias=False)
    model.weight.grad = torch.tensor([[3.0], [4.0]])
    assert clip_grad_norm(model.parameters(), 0.0) == 5
    assert model.weight.grad.tolist() == [[3.0], [4.0]]
    assert clip_grad_norm(model.parameters(), 1.0) == 5
    assert torch.allclose(model.weight.grad.norm(), torch.tensor(1.0))

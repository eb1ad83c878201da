"""A step whose loss or gradient is not finite: left out or the end, alike on all ranks, and never in the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from evenkeel.config import Config
from evenkeel.gradients import clip
from evenkeel.nonfinite import NonFinite
from evenkeel.optimization import build_optimizer
from evenkeel.state import State, sha256

from .processes import TRAIN, finish_all, fork_ranks, read, records, run, torchrun
from .test_train import PLAN, job

BAD = 7
"""The step that is not finite, counted from 1."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "ours, adamw": lambda p: build_optimizer(p, Config(optimizer="adamw")),
    "ours, adam": lambda p: build_optimizer(p, Config(optimizer="adam")),
    "ours, sgd": lambda p: build_optimizer(p, Config(optimizer="sgd")),
    "a user's own": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
}


def take(state: State, gradient: float) -> None:
    """One step with the same number everywhere in the gradient, and a new value of the buffers."""
    state.clear_gradients()
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    buffers = [group.committed + gradient for group in state.buffers.groups]
    state.commit(buffers, clip(state.parameters, 0.0))


def everything(state: State) -> str:
    captured = state.capture()
    tensors: dict[str, Tensor] = dict(captured["model"])
    for i, (parameter, values) in enumerate(captured["optimizers"][0]["state"].items()):
        tensors |= {f"{i} {parameter} {name}": v for name, v in values.items() if isinstance(v, Tensor)}
    return sha256(tensors)


def new_state(optimizer: str, skip: bool) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    return State(model, [OPTIMIZERS[optimizer](list(model.parameters()))], skip)


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
    assert clip(model.parameters(), 0.0) == 5
    assert model.weight.grad.tolist() == [[3.0], [4.0]]
    assert clip(model.parameters(), 1.0) == 5
    assert torch.allclose(model.weight.grad.norm(), torch.tensor(1.0))


@pytest.mark.multiprocess
def test_a_loss_of_nan_on_one_rank_stops_all_at_the_step_before(tmp_path: Path) -> None:
    """Its gradient is finite, and only rank 0 sees it; still every rank ends by itself, at the same step."""
    run_dir = tmp_path / "run"
    # two micro-batches of a full step on each of the 2 ranks, one on rank 0 in the last
    options = job(run_dir, "--checkpoint-every", 0, "--nan-at", 2 * BAD)
    done = run(torchrun(2, TRAIN, *options), expect=1)
    assert f"evenkeel: the loss or the gradient of step {BAD} is not finite" in done.stderr
    status = read(run_dir, "status.json")
    assert (status["state"], status["step"]) == ("failed", BAD - 1)
    assert "not finite" in status["reason"]
    assert (run_dir / "checkpoints" / f"step-{BAD - 1:08d}").is_dir()
    for rank in (0, 1):
        log = (run_dir / "logs" / "attempt-0001" / f"rank-{rank}.log").read_text()
        assert f"failed at step {BAD - 1}: the loss or the gradient" in log

    finish_all(fork_ranks(2, TRAIN, *options, "--on-nonfinite", "skip"))
    assert read(run_dir)["step"] == PLAN.total_steps


@pytest.mark.multiprocess
def test_skip_leaves_the_step_out_on_all_ranks_and_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finish_all(fork_ranks(2, TRAIN, *job(run_dir, "--on-nonfinite", "skip", "--nan-at", 2 * BAD)))
    assert [(record["step"], record["skipped"]) for record in records(run_dir, "nonfinite")] == [(BAD, 1)]
    assert read(run_dir)["step"] == PLAN.total_steps
    weights = torch.load(run_dir / "model.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_finite_step_makes_no_host_wait_on_a_gpu() -> None:
    model = nn.Linear(64, 64).cuda()
    state = State(model, [build_optimizer(list(model.parameters()), Config())])
    take(state, 0.5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            take(state, 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")

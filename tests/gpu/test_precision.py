"""Mixed precision: what is computed in which type, float16's loss scaling, and both through kills."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from evenkeel.config import Config
from evenkeel.distributed.world import World
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.precision import Precision, Scaler
from evenkeel.training.state import State
from tests.support.gpu import no_waits
from tests.support.steps import passes
from tests.training.test_nonfinite import take
from tests.training.test_precision import PLAN, Small


def test_an_overflow_makes_no_host_wait_on_a_gpu() -> None:
    """Neither do the average of the weights and the choice of the next scale."""
    device = torch.device("cuda", 0)
    model = nn.Linear(64, 64).to(device)
    optimizer = build_optimizer(list(model.parameters()), Config())
    state = State(model, [optimizer], scaler=Scaler(device), ema=0.9)
    loss = torch.zeros((), device=device)

    def scaled(gradient: float) -> None:
        state.clear_gradients()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        state.scaler.unscale(model.parameters())
        state.commit(clip_grad_norm(model.parameters(), 1.0), [], loss)

    scaled(1.0)
    torch.cuda.synchronize()
    with no_waits():
        for gradient in (1.0, math.inf, 1.0):
            scaled(gradient)
    assert state.scaler.scale.item() == 32768.0
    assert int(state.scaler.overflows) == 1
    assert all(p.isfinite().all() for p in state.best_model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_that_of_the_gpu(precision: Precision) -> None:
    device = torch.device("cuda", 0)
    task = Small()
    model = task.model().to(device)
    scaler = Scaler(device) if precision == "fp16" else None
    state = State(model, [build_optimizer(model.parameters(), Config())], scaler=scaler)
    alone = World(0, 0, 1, 1, device, launched=False)
    gradients = DistributedLoss(task.loss, state, alone, PLAN, Config(precision=precision))
    batches = [task.train_dataset().__getitems__(list(range(i, i + 4))) for i in (0, 4)]
    passes(gradients, 0, PLAN.micro_batches(0), batches)
    gradients.step(clip_grad_norm(model.parameters(), 0.0))
    assert task.types == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_finite_step_makes_no_host_wait_on_a_gpu() -> None:
    model = nn.Linear(64, 64).cuda()
    state = State(model, [build_optimizer(list(model.parameters()), Config())])
    take(state, 0.5)
    with no_waits():
        for _ in range(3):
            take(state, 0.5)

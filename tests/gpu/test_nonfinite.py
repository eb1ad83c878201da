"""A step whose loss or gradient is not finite: left out or the end, alike on all ranks, and never in the weights."""

from __future__ import annotations

from torch import nn

from evenkeel.config import Config
from evenkeel.training.optimization import build_optimizer
from evenkeel.training.state import State
from tests.support.gpu import no_waits
from tests.training.test_nonfinite import take


def test_a_finite_step_makes_no_host_wait_on_a_gpu() -> None:
    model = nn.Linear(64, 64).cuda()
    state = State(model, [build_optimizer(list(model.parameters()), Config())])
    take(state, 0.5)
    with no_waits():
        for _ in range(3):
            take(state, 0.5)

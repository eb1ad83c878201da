"""`--strategy dp`: uneven shares of a micro-batch in one process have the result of DDP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.data_parallel import Parallel, replicas
from evenkeel.distributed.world import World
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.state import State
from tests.distributed.test_data_parallel import Forty
from tests.support.steps import passes


def train_by(world: World, strategy: Any, batches: Sequence[Any], plan: Plan) -> Any:
    task = Forty()
    model = copy.deepcopy(task.model()).to(world.device)
    state = State(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    gradients = DistributedLoss(task.loss, state, world, plan, Config(strategy=strategy))
    losses = []
    for step, batch in enumerate(batches):
        state.clear_gradients()
        passes(gradients, step, plan.micro_batches(step), [batch])
        losses.append(gradients.loss.item())
        state.optimizers[0].step()
    return gradients, losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_several_gpus_it_is_the_plain_module_up_to_rounding() -> None:
    data, plan = Forty().train_dataset(), Plan(40, 30, 30, 1)
    batches = [data.__getitems__(list(range(30))), data.__getitems__(list(range(30, 40)))]
    world = World(0, 0, 1, 1, torch.device("cuda", 0), launched=False)
    gradients, losses, weights = train_by(world, "dp", batches, plan)
    assert isinstance(gradients.module, Parallel)
    assert len(replicas("dp", world.device)) >= 2
    _, expected_losses, expected = train_by(world, "ddp", batches, plan)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for found, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-5)

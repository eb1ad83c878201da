"""Networks that take turns, and a gradient penalty, beside a plain loop."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.common.errors import EndedHere
from evenkeel.data.plan import Plan
from evenkeel.data.randomness import derive, seed_computation
from evenkeel.training.checks import raise_explained
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.state import State
from tests.support.steps import passes
from tests.support.turns_task import EVERY, Turns
from tests.training.test_gradients import ALONE

PLAN = Plan(32, global_batch=8, micro_batch=8, epochs=2)


def plain(task: Turns, steps: int) -> nn.Module:
    """A tutorial's loop: a backward pass for each network, and the generator's optimizer in every third step."""
    torch.manual_seed(1)
    model: Any = task.model()
    of_generator, of_critic = task.optimizers(model, None)
    data = task.train_dataset()
    for step in range(steps):
        real = data[slice(step % 4 * 8, step % 4 * 8 + 8)][0]
        seed_computation(derive(0, "micro-batch", step, 0), ALONE.devices)
        made = model["generator"](torch.randn(8, 2))
        between = (real + torch.rand(8, 1) * (made.detach() - real)).requires_grad_()
        (slope,) = torch.autograd.grad(model["critic"](between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        d_loss: Tensor = model["critic"](made.detach()).mean() - model["critic"](real).mean() + penalty
        gradients = torch.autograd.grad(d_loss, list(model["critic"].parameters()))
        if step % EVERY == 0:
            of_generator.zero_grad()
            (-model["critic"](made).mean()).backward()
            of_generator.step()
        for parameter, gradient in zip(model["critic"].parameters(), gradients, strict=True):
            parameter.grad = gradient
        of_critic.step()
    return model  # type: ignore[no-any-return]


def test_turns_and_penalty_have_the_weights_of_a_plain_loop() -> None:
    task = Turns()
    torch.manual_seed(1)
    model = task.model()
    state = State(model, task.optimizers(model, None))
    learner = DistributedLoss(task.loss, state, ALONE, PLAN, unused_parameters=True)
    data = task.train_dataset()
    for step in range(8):
        of_generator = model.get_submodule("generator").state_dict()
        before = {name: tensor.clone() for name, tensor in of_generator.items()}
        batch = data.__getitems__(list(range(step % 4 * 8, step % 4 * 8 + 8)))
        passes(learner, step, PLAN.micro_batches(step), [batch])
        learner.step(clip_grad_norm(state.parameters, 0.0))
        same = all(before[name].equal(tensor) for name, tensor in of_generator.items())
        assert same == (step % EVERY != 0), "the generator has its turn, or not a bit of it changes"
    for one, other in zip(model.parameters(), plain(task, 8).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert list(learner.parts) == ["d_loss", "penalty"]


def test_compiled_networks_have_no_double_backward_and_a_line_says_so() -> None:
    error = RuntimeError("torch.compile with aot_autograd does not currently support double backward")
    with pytest.raises(EndedHere, match="--compile: the loss takes the gradient of a gradient"):
        raise_explained(error, nn.Linear(1, 1))

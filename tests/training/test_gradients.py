"""The gradient of a step is that of the mean over the global batch, at any world size."""

import pytest
import torch
from torch import Tensor, nn

from evenkeel.common.errors import Ended
from evenkeel.config import Config
from evenkeel.data.dataset import InMemory
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.training.classification import Classification
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.state import State
from tests.support.steps import passes

ALONE = World(0, 0, 1, 1, torch.device("cpu"), launched=False)


class TinyNet(nn.Module):
    """BatchNorm and an infinite constant among the buffers, which must stay what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TinyTask(Classification):
    def data(self, samples: int) -> InMemory:
        generator = torch.Generator().manual_seed(3)
        return InMemory(torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))

    def train_dataset(self) -> InMemory:
        return self.data(26)

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return TinyNet()


def step_gradient(plan: Plan, step: int, model: nn.Module) -> Tensor:
    """What `backward` gives for one step in one process."""
    task = TinyTask()
    data = task.train_dataset()
    micro_batches = plan.micro_batches(step)
    batches = [data.__getitems__(list(range(m.start, m.start + m.size))) for m in micro_batches]
    state = State(model, [])
    gradients = DistributedLoss(task.loss, state, ALONE, plan)
    passes(gradients, step, micro_batches, batches)
    gradients.step(clip_grad_norm(model.parameters(), 0.0))
    loss = gradients.loss
    assert loss.dim() == 0
    assert not loss.requires_grad
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("step", [0, 1], ids=["full step", "short tail"])
def test_uneven_micro_batches_give_the_gradient_of_the_mean(step: int) -> None:
    plan = Plan(samples=26, global_batch=16, micro_batch=5, epochs=1)  # 5+5+5+1, then 5+5
    model = nn.Linear(6, 3)
    got = step_gradient(plan, step, model)

    images, labels = TinyTask().train_dataset()[slice(step * 16, step * 16 + plan.step_samples(step))]
    model.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    torch.testing.assert_close(got, torch.cat([p.grad.flatten() for p in model.parameters()]))


def test_batchnorm_statistics_move_once_a_step_by_the_mean_of_the_micro_batches() -> None:
    plan = Plan(samples=26, global_batch=16, micro_batch=8, epochs=1)
    model = TinyTask().model()
    before = model.layers[1].running_mean.clone()
    features = model.layers[0](TinyTask().train_dataset()[slice(0, 16)][0]).detach()
    step_gradient(plan, 0, model)
    expected = 0.9 * before + 0.1 * torch.stack([features[:8].mean(0), features[8:].mean(0)]).mean(0)
    torch.testing.assert_close(model.layers[1].running_mean, expected)
    assert model.layers[1].num_batches_tracked == 1
    assert model.mask.tolist() == [0.0, float("-inf")]


def test_an_exception_and_a_copy_in_mid_step_have_the_buffers_of_the_last_step() -> None:
    """Also those of a layer with two names."""

    class Breaks(TinyTask):
        calls = 0

        def loss(self, model: nn.Module, batch: object) -> Tensor:
            loss = super().loss(model, batch)
            self.calls += 1
            if self.calls == 2:
                copy.update(state.capture()["model"])
                raise RuntimeError("a peer died")
            return loss

    task, plan = Breaks(), Plan(samples=26, global_batch=16, micro_batch=8, epochs=1)
    model, copy = task.model(), dict[str, Tensor]()
    model.again = model.layers[1]  # type: ignore[index]
    before = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    state, data = State(model, []), task.train_dataset()
    batches = [data.__getitems__(list(range(i, i + 8))) for i in (0, 8)]
    gradients = DistributedLoss(task.loss, state, ALONE, plan)
    with pytest.raises(RuntimeError, match="a peer died"):
        passes(gradients, 0, plan.micro_batches(0), batches)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        assert torch.equal(buffer, before[name]), name
        assert torch.equal(copy[name], before[name]), name


def test_dropout_depends_on_the_micro_batch_and_not_on_what_ran_before() -> None:
    plan = Plan(samples=26, global_batch=16, micro_batch=4, epochs=1)

    def gradient(disturb: int) -> Tensor:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        torch.manual_seed(disturb)
        return step_gradient(plan, 0, model)

    assert torch.equal(gradient(1), gradient(2))


def test_networks_that_take_turns_are_refused_where_the_other_one_would_be_left_behind() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 1), "other": nn.Linear(2, 1)})
    plan = Plan(samples=4, global_batch=4, micro_batch=4, epochs=1)
    with pytest.raises(Ended, match="--strategy dp, --shard and --sync-batchnorm are not for networks that take turns"):
        DistributedLoss(TinyTask().loss, State(model, []), ALONE, plan, Config(strategy="dp"), network=model["one"])

"""Parts of a loss, and several metrics from one forward pass, in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenkeel.common.errors import Ended
from evenkeel.config import Config
from evenkeel.data.dataset import InMemory
from evenkeel.data.plan import Plan
from evenkeel.distributed.data_parallel import Share, chunks, divide
from evenkeel.training.checks import checked_losses
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.evaluation import Evaluation
from evenkeel.training.loss import ModelWithLoss
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.state import State
from evenkeel.training.task import Task
from tests.support.steps import passes
from tests.training.test_gradients import ALONE

SAMPLES, CLASSES = 37, 9


class Counted(nn.Linear):
    """Counts its forward passes."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


def hits(logits: Tensor, labels: Tensor, most: int) -> Tensor:
    return (logits.topk(most).indices == labels[:, None]).any(1)


class Tops(Task):
    """Top-1 and top-5, in training and evaluation, from the pass that there is anyway."""

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(0)
        return InMemory(torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % CLASSES)

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return Counted(6, CLASSES)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor | float]]:
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        tops = {f"top{most}": hits(logits, batch[1], most).float().mean() for most in (1, 5)}
        return loss, {**tops, "same": loss, "weight": 0.5}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits = model(batch[0])
        return {f"top{most}": hits(logits, batch[1], most) for most in (1, 5)}


class OnlyTheLoss(Tops):
    metrics = Task.metrics


def trained(task: Tops, model: nn.Module, plan: Plan) -> DistributedLoss:
    data = task.train_dataset()
    micro_batches = plan.micro_batches(0)
    batches = [data.__getitems__(list(range(m.start, m.start + m.size))) for m in micro_batches]
    learner = DistributedLoss(task.loss, State(model, []), ALONE, plan)
    passes(learner, 0, micro_batches, batches)
    learner.step(clip_grad_norm(model.parameters(), 0.0))
    return learner


@pytest.mark.parametrize("task", [Tops, OnlyTheLoss])
def test_a_loss_on_another_device_is_added_up_on_the_ranks_own(task: type[Tops]) -> None:
    """The rank's device is "meta" here: without a GPU the only other one."""
    made, plan = task(), Plan(SAMPLES, global_batch=8, micro_batch=8, epochs=1)
    model = made.model()
    loss = made.loss if task is Tops else lambda network, batch: made.loss(network, batch)[0]
    learner = DistributedLoss(loss, State(model, []), ALONE, plan)
    learner.world = replace(ALONE, device=torch.device("meta"))
    passes(learner, 0, plan.micro_batches(0), [made.train_dataset().__getitems__(list(range(8)))])
    assert learner.loss.device.type == "meta"


def test_parts_are_means_over_the_global_batch_of_uneven_micro_batches() -> None:
    task, plan = Tops(), Plan(SAMPLES, global_batch=37, micro_batch=8, epochs=1)
    model = task.model()
    learner = trained(task, model, plan)
    assert model.passes == len(plan.micro_batches(0)) == 5, "one forward pass each"
    parts = {name: part.item() for name, part in learner.parts.items()}
    assert list(parts) == ["top1", "top5", "same", "weight"]
    assert parts["same"] == learner.loss.item(), "in every bit"
    assert parts["weight"] == pytest.approx(0.5)
    images, labels = task.train_dataset().tensors
    for most in (1, 5):
        right = hits(model(images), labels, most).double()
        assert parts[f"top{most}"] == pytest.approx(right.mean().item(), abs=1e-7)
        naive = torch.stack([part.mean() for part in right.split(8)]).mean().item()
        assert naive != pytest.approx(right.mean().item(), abs=1e-4), "the control: a mean of means"


def test_a_part_changes_no_bit_of_the_gradient() -> None:
    class Without(Tops):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch)[0]

    plan = Plan(SAMPLES, global_batch=37, micro_batch=8, epochs=1)
    found = []
    for task in (Tops(), Without()):
        model = task.model()
        assert bool(trained(task, model, plan).parts) == (type(task) is Tops)
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]


def test_among_the_gpus_of_one_process_parts_count_by_samples() -> None:
    """With copies on the CPU, as in test_data_parallel."""
    task = Tops()
    model, batch = task.model(), task.train_dataset().__getitems__(list(range(10)))
    shares = [Share(ModelWithLoss(model, task.loss))(part) for part in divide(batch, chunks(10, 4))]
    loss, parts = (torch.cat(each).sum(0) / 10 for each in zip(*shares, strict=True))
    whole, expected = ModelWithLoss(model, task.loss)(batch)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(parts, expected)


@pytest.mark.parametrize("task", [Tops(), OnlyTheLoss()])
def test_top_1_and_top_5_of_the_evaluation_take_one_pass(task: Tops) -> None:
    model, data = task.model(), task.test_dataset()
    found = Evaluation(task, model, data, Config(micro_batch=8), ALONE)()
    assert model.passes == 5
    images, labels = data.tensors
    for most in (1, 5):
        assert found[f"top{most}"] == pytest.approx(hits(model(images), labels, most).double().mean().item())


def test_parts_may_be_numbers_and_may_be_named_as_they_are_logged() -> None:
    loss, parts = checked_losses((torch.ones((), requires_grad=True), {"train/kl": 0.25, "flag": True}))
    assert {name: (part.item(), part.device) for name, part in parts.items()} == {
        "kl": (0.25, loss.device),
        "flag": (1.0, loss.device),
    }
    for names in (["train/loss"], ["kl", "train/kl"]):
        with pytest.raises(Ended, match="a name that training already logs: rename it"):
            checked_losses((loss, dict.fromkeys(names, 0.5)))

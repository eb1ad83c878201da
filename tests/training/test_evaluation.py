"""Every test sample once: in one process, where the result can be compared with a plain loop."""

import copy
import json
import math
import random
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.utils.data import Dataset, Subset, TensorDataset

from evenkeel.common.errors import Ended
from evenkeel.config import Config
from evenkeel.data.dataset import InMemory, SizedDataset
from evenkeel.data.randomness import seed_host
from evenkeel.distributed.world import World
from evenkeel.training.checks import checked_summary
from evenkeel.training.classification import Classification
from evenkeel.training.evaluation import Evaluation, tensors_restored
from evenkeel.training.task import Task

ALONE = World(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), launched=False)
CLASSES = 3
SAMPLES = 37  # micro-batches of 5: seven, and one of 2


@pytest.fixture
def test_set() -> InMemory:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return InMemory(images, torch.randint(CLASSES, (SAMPLES,), generator=generator))


@pytest.fixture
def model() -> nn.Module:
    """With layers that behave differently in training."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))
    return net.double()


class Classify(Classification):
    """Cross-entropy and accuracy of whatever it is given."""

    train_dataset = test_dataset = model = None


def evaluation(task: Task, model: nn.Module, data: SizedDataset, micro_batch: int = 5, workers: int = 0) -> Evaluation:
    return Evaluation(task, model, data, Config(micro_batch=micro_batch, num_workers=workers), ALONE)


def plain_loop(model: nn.Module, test_set: InMemory) -> dict[str, float]:
    """One sample at a time."""
    model.eval()
    losses, right = [], 0
    for image, label in test_set:
        with torch.no_grad():
            logits = model(image.unsqueeze(0))
        losses.append(F.cross_entropy(logits, label.unsqueeze(0)).item())
        right += int(logits.argmax(1).item() == label.item())
    model.train()
    return {"loss": math.fsum(losses) / len(losses), "accuracy": right / len(losses)}


@pytest.mark.parametrize("micro_batch", [1, 5, 8, 36, 37, 64])
def test_metrics_are_those_of_a_plain_loop(model: nn.Module, test_set: InMemory, micro_batch: int) -> None:
    expected = plain_loop(model, test_set)

    found = evaluation(Classify(), model, test_set, micro_batch)()

    assert found["accuracy"] == expected["accuracy"]  # counts are exact
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-13)
    assert all(type(value) is float for value in found.values())


def test_low_precision_values_are_added_in_high_precision(model: nn.Module) -> None:
    class InHalfPrecision(Classify):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {"count": torch.ones(len(batch[0]), dtype=torch.bfloat16), "value": batch[0].to(torch.bfloat16)}

    many = InMemory(torch.full((3001,), 0.1))
    found = evaluation(InHalfPrecision(), model, many, micro_batch=999)()

    assert found["count"] == 1  # bfloat16 cannot count beyond 256
    assert found["value"] == pytest.approx(torch.tensor(0.1, dtype=torch.bfloat16).item(), rel=1e-13)


def test_metrics_that_draw_do_not_depend_on_the_kind_of_data_set_or_on_who_loads_it(test_set: InMemory) -> None:
    class Noisy(Classify):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {"noise": torch.rand(len(batch[0]), dtype=torch.float64)}

    collated, listed = TensorDataset(*test_set.tensors), Subset(cast(Any, list(test_set)), range(SAMPLES))
    found: list[float] = []
    for dataset, workers in ((test_set, 0), (collated, 0), (listed, 0), (test_set, 2)):
        torch.manual_seed(len(found))
        found.append(evaluation(Noisy(), nn.Linear(1, 1), dataset, workers=workers)()["noise"])
    assert len(set(found)) == 1


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_in_evaluation_mode_and_left_alone(model: nn.Module, test_set: InMemory, training: bool) -> None:
    modes = []

    class Watching(Classify):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            training = any(m.training for m in model.modules())
            modes.append((training, torch.is_grad_enabled(), model(batch[0]).requires_grad))
            return super().metrics(model, batch)

    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    evaluation(Watching(), model, test_set)()

    assert modes == [(False, False, False)] * 8
    assert {m.training for m in model.modules()} == {training}
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # BatchNorm's as well


def test_a_frozen_part_of_the_model_stays_in_evaluation_mode(model: nn.Module, test_set: InMemory) -> None:
    """As fine-tuning does with BatchNorm. Otherwise training after an evaluation differs from training before."""
    model[1].eval()
    evaluation(Classify(), model, test_set)()
    assert [m.training for m in model] == [True, False, True, True, True]


def test_summarize_turns_means_of_any_shape_into_numbers(model: nn.Module, test_set: InMemory) -> None:
    """Mean intersection over union from a confusion matrix for each sample, which no mean over batches gives."""

    class Segmentation(Classify):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            images, labels = batch
            truth, guess = F.one_hot(labels, CLASSES), F.one_hot(model(images).argmax(1), CLASSES)
            return {"confusion": truth.unsqueeze(2) * guess.unsqueeze(1)}

        def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
            confusion = means["confusion"]
            assert confusion.shape == (CLASSES, CLASSES)
            assert confusion.dtype == torch.float64
            both = confusion.diagonal()
            return {"iou": float((both / (confusion.sum(0) + confusion.sum(1) - both)).mean())}

    found = evaluation(Segmentation(), model, test_set)()

    model.eval()
    images, labels = test_set.tensors
    guesses = model(images).argmax(1)
    each = [(guesses == c, labels == c) for c in range(CLASSES)]
    ious = [(guess & label).sum().item() / (guess | label).sum().item() for guess, label in each]
    assert found == {"iou": pytest.approx(sum(ious) / CLASSES, rel=1e-13)}


class Noisy(Dataset[Any]):
    """A test set with random crops, say."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, float, float]:
        return torch.rand(()), random.random(), np.random.rand()


class MeanNoise(Classify):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return dict(zip(("torch", "python", "numpy"), batch, strict=True))


def test_a_random_test_set_is_the_same_every_time_and_for_any_cut_and_workers(model: nn.Module) -> None:
    first = evaluation(MeanNoise(), model, Noisy())()
    assert all(0.3 < value < 0.7 for value in first.values())  # samples differ from each other

    torch.rand(1), random.random(), np.random.rand()
    assert evaluation(MeanNoise(), model, Noisy())() == first
    assert evaluation(MeanNoise(), model, Noisy(), workers=2)() == first
    assert evaluation(MeanNoise(), model, Noisy(), micro_batch=8)() == pytest.approx(first, rel=1e-13)


def test_metrics_draw_other_numbers_than_the_samples_did(model: nn.Module) -> None:
    class Draws(Classify):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            mine = torch.rand(()), random.random(), np.random.rand()
            return {str(number): part == its for number, (part, its) in enumerate(zip(batch, mine, strict=True))}

    assert set(evaluation(Draws(), model, Noisy())().values()) == {0.0}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rehearsal_is_a_micro_batch_and_leaves_no_trace(model: nn.Module, test_set: InMemory, workers: int) -> None:
    seen: list[int] = []

    class Careless(Classify):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            seen.append(len(batch[0]))
            model.train()
            with torch.enable_grad():
                found = super().metrics(model.requires_grad_(False), batch)
            return found | {"noise": torch.rand(len(batch[0])) + random.random() + np.random.rand()}

    def everything() -> list[Any]:
        generators = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
        flags = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
        return [*generators, *flags, [value.tolist() for value in model.state_dict().values()]]

    undisturbed = evaluation(Careless(), copy.deepcopy(model), test_set, workers=workers)()
    seen.clear()
    evaluate = evaluation(Careless(), model, test_set, workers=workers)
    seed_host(12345)  # not where an evaluation leaves the generators
    before = everything()
    assert (evaluate.rehearse() or {}).keys() == {"loss", "accuracy", "noise"}
    assert everything() == before
    assert seen == [5], "and no other"
    assert evaluate() == undisturbed
    assert seen == [5] * 8 + [2]
    assert everything() != before, "the control: an evaluation of this task does leave traces"


class Grows(nn.Module):
    """A queue that grows in place, one that is replaced, and sparse ones, of which one changes its pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1))
        self.register_buffer("other", torch.ones(2))
        for name, layout in (("coo", torch.sparse_coo), ("csr", torch.sparse_csr)):
            self.register_buffer(name, torch.eye(3).to_sparse(layout=layout), persistent=False)
        self.observer = PerChannelMinMaxObserver()  # of quantization-aware training

    def forward(self, x: Tensor) -> Tensor:
        self.queue.resize_(4).fill_(7)
        self.other = torch.cat([self.other, x[:1, 0].float()])
        self.coo.add_(torch.ones(3, 3).to_sparse())
        self.csr.values().mul_(2)
        return self.observer(x)


def test_buffers_that_have_grown_and_sparse_ones_are_put_back_in_their_objects() -> None:
    model = Grows()
    before = {name: (buffer, buffer.to_dense().clone()) for name, buffer in model.named_buffers()}
    with tensors_restored(model):
        model(torch.randn(5, 3))
        assert model.queue.tolist() == [7] * 4
        assert len(model.observer.min_val) == 5
    for name, buffer in model.named_buffers():
        same, value = before[name]
        assert torch.equal(buffer.to_dense(), value), name
        assert buffer is same, f"{name}: the state has the one from before"
    model(torch.randn(5, 3))  # and it works again


@pytest.mark.parametrize(("kind", "ends"), [(ZeroDivisionError, False), (ValueError, False), (KeyError, True)])
def test_a_class_that_the_first_micro_batch_lacks_ends_no_run(
    model: nn.Module, test_set: InMemory, kind: type[Exception], ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Summary(Classify):
        def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
            raise kind("1")

    evaluate = evaluation(Summary(), model, test_set)
    with pytest.raises(kind) if ends else nullcontext():
        assert evaluate.rehearse() is None
        assert f"for the first 5 test samples at {__file__}:" in caplog.text
    with pytest.raises(kind):
        evaluate()


def test_numbers_of_all_kinds_are_plain_ones_afterwards() -> None:
    numbers = [1, 0.5, True, np.float32(0.5), np.int64(3), np.ones(1), torch.tensor(2), torch.tensor([math.nan])]
    plain = checked_summary(dict(zip("abcdefgh", numbers, strict=True)))
    assert [type(value) for value in plain.values()] == [int, float, float, float, int, float, int, float]
    assert json.dumps(plain).startswith('{"a": 1, "b": 0.5, "c": 1.0, "d": 0.5, "e": 3,')
    for odd in (None, "0.5", 1j, [1.0], torch.zeros(2), torch.tensor(1j)):
        with pytest.raises(Ended, match=r"^summarize\(\) returned .* as 'a': it must be one real number$"):
            checked_summary({"a": odd})
    with pytest.raises(TypeError, match="not JSON serializable"):  # the control
        json.dumps({"d": np.float32(0.5)})


def test_ranks_whose_metrics_do_not_fit_together_are_told(model: nn.Module, test_set: InMemory) -> None:
    class TwoRanks(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value, {"loss": torch.zeros(1, 3), "accuracy": torch.zeros(1)}]

    world = TwoRanks(rank=0, local_rank=0, world_size=2, local_world_size=2, device=ALONE.device, launched=False)
    with pytest.raises(Ended, match=r"rows of shape \[\] as 'loss' for one batch and of \[3\] for another"):
        Evaluation(Classify(), model, test_set, Config(micro_batch=5), world)()


class OnlyALoss(Classify):
    """Leaves `metrics` out."""

    metrics = Task.metrics


def test_a_scalar_is_the_mean_of_its_micro_batch_however_uneven_these_are(model: nn.Module, test_set: InMemory) -> None:
    found = evaluation(OnlyALoss(), model, test_set)()
    assert found["loss"] == pytest.approx(plain_loop(model, test_set)["loss"], rel=1e-12)
    images, labels = test_set.tensors
    parts = [nn.functional.cross_entropy(model(images[i : i + 5]), labels[i : i + 5]).item() for i in range(0, 37, 5)]
    assert sum(parts) / len(parts) != pytest.approx(found["loss"], rel=1e-6), "the control: a mean of means"

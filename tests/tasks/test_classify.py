"""The built-in tasks in training: augmentation, mixing, label smoothing, and the promises with all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenkeel.config import check_numbers
from evenkeel.data.loader import Seeded
from evenkeel.tasks.classify import Classify
from tests.support.processes import run_forked
from tests.support.raised import refusal_of


class Fixed(nn.Module):
    """A network whose outputs are given."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, images: torch.Tensor) -> Any:
        self.seen = images
        return self.outputs if len(self.outputs) > 1 else self.outputs[0]


def small_batch(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = Classify().train_dataset().__getitems__(list(range(count)))  # type: ignore[attr-defined]
    return images, labels


@pytest.mark.parametrize("kind", ["basic", "trivial", "rand"])
@pytest.mark.parametrize("dataset", ["digits", "fake"])
def test_augmentation_is_the_samples_own(kind: Any, dataset: Any) -> None:
    task = Classify(dataset=dataset, augment=kind, image_size=16 if dataset == "fake" else 0)
    whole = Classify(dataset=dataset, image_size=task.image_size).train_dataset()
    train = Seeded(task.train_dataset(), seed=0, purpose="train")
    first = train._sample(0, 5, 5)[0]
    assert (first.shape, first.dtype) == (whole[5][0].shape, torch.uint8)
    assert torch.equal(train._sample(0, 5, 5)[0], first)
    found = [train._sample(epoch, 5, 5)[0] for epoch in range(20)]
    assert len({image.numpy().tobytes() for image in found}) > 5, "each epoch has its own"
    assert isinstance(task.test_dataset(), type(whole)), "nothing random in the test"


def test_digits_are_not_mirrored_and_photographs_are() -> None:
    """A shift by at most one pixel and no flip: each result is one of nine."""
    plain = Classify().train_dataset()[5][0]
    padded = F.pad(plain, (1, 1, 1, 1))
    shifts = {padded[:, y : y + 8, x : x + 8].numpy().tobytes() for x in range(3) for y in range(3)}
    train = Seeded(Classify(augment="basic").train_dataset(), seed=0, purpose="train")
    assert {train._sample(epoch, 5, 5)[0].numpy().tobytes() for epoch in range(60)} == shifts
    fake = Classify(dataset="fake", augment="basic", image_size=8)
    whole = Classify(dataset="fake", image_size=8).train_dataset()[5][0]
    padded = F.pad(torch.stack([whole, whole.flip(-1)]), (1, 1, 1, 1))
    both = {p[:, y : y + 8, x : x + 8].numpy().tobytes() for p in padded for x in range(3) for y in range(3)}
    train = Seeded(fake.train_dataset(), seed=0, purpose="train")
    assert {train._sample(epoch, 5, 5)[0].numpy().tobytes() for epoch in range(200)} == both


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}], ids=str)
def test_mixing_is_the_micro_batchs_own_and_only_in_training(options: dict[str, float]) -> None:
    task, batch = Classify(**options), small_batch()
    model = Fixed(torch.randn(6, 10, requires_grad=True))
    plain = Classify().loss(model, batch)
    found = []
    for seed in (1, 1, *range(2, 12)):
        torch.manual_seed(seed)
        loss = task.loss(model, batch).item()
        found.append((loss, model.seen.numpy().tobytes()))
    assert found[0] == found[1]
    assert len(set(found)) > 8
    assert sum(loss != plain.item() for loss, _ in found) > 8, "the labels are mixed as well"
    assert task.loss(model.eval(), batch).item() == plain.item()
    assert torch.equal(model.seen, task.inputs(batch[0]))
    assert batch[0].dtype == torch.uint8, "what came is as it was"


def test_label_smoothing_and_auxiliary_outputs() -> None:
    torch.manual_seed(0)
    batch, outputs = small_batch(), [torch.randn(6, 10) for _ in range(3)]
    smooth = Classify(label_smoothing=0.1).loss(Fixed(outputs[0]), batch)
    log = F.log_softmax(outputs[0], 1)
    expected = -(0.9 * log[range(6), batch[1]] + 0.1 * log.mean(1)).mean()
    torch.testing.assert_close(smooth, expected)
    values = Classify(label_smoothing=0.1).metrics(Fixed(outputs[0]), batch)["loss"]
    torch.testing.assert_close(values, F.cross_entropy(outputs[0], batch[1], reduction="none"))
    each = [F.cross_entropy(output, batch[1]) for output in outputs]
    torch.testing.assert_close(Classify().loss(Fixed(*outputs), batch), each[0] + 0.4 * (each[1] + each[2]))


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_outputs_train(name: str) -> None:
    task = Classify(dataset="fake", image_size=299, model_=name, fake_classes=3)
    batch = torch.utils.data.default_collate([task.train_dataset()[i] for i in range(2)])
    model = task.model()
    task.loss(model, batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert task.metrics(model.eval(), batch)["accuracy"].shape == (2,)


def test_grey_images_for_a_network_of_colour_ones_are_enlarged_and_repeated() -> None:
    task = Classify(model_="resnet18", image_size=32)
    seen = task.inputs(small_batch()[0])
    assert seen.shape == (6, 3, 32, 32)
    assert torch.equal(seen[:, 0], seen[:, 2])


def test_the_default_job_does_not_wait_for_torchvision(tmp_path: Path) -> None:
    made = "task.train_dataset(), task.test_dataset(), task.model()"
    parsed = "import sys; from evenkeel.tasks.command_line import parse; _, task = parse([])"
    (script := tmp_path / "script.py").write_text(f"{parsed}; {made}; print('torchvision' in sys.modules)")
    assert run_forked(script).stdout == "False\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "--label-smoothing 1.0: must be below 1"),
        ({"width": 0}, "--width 0: must be at least 1"),
        ({"dropout": 1.0}, "--dropout 1.0: must be below 1"),
        ({"dropout": float("nan")}, "--dropout nan: must be at least 0"),
        ({"mixup": -0.1}, "--mixup -0.1: must be at least 0"),
        ({"cutmix": float("nan")}, "--cutmix nan: must be at least 0"),
        ({"image_size": -1}, "--image-size -1: must be at least 0"),
        ({"model_": "resnet19"}, "--model resnet19: is neither cnn nor"),
        ({"pretrained": True}, "--pretrained: there are no published weights of --model cnn"),
        ({"fake_samples": 0}, "--fake-samples 0"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    assert refusal_of(lambda: check_numbers(Classify(**options))).startswith(message)

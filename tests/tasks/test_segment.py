"""The task `segment`: two networks and two optimizers in one step, and everything that is promised holds for them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from evenkeel.common.errors import Ended, Refusal
from evenkeel.config import Config, check_numbers
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.digits import digits
from evenkeel.tasks.segment import CLASSES, PooledNorm, Segment, confusion, one_hot, pixel_loss, segmenter
from evenkeel.training.optimization import Rates
from evenkeel.training.task import constants

SMALL = Segment(backbone="small", canvas=32, digit_size=16, samples=40, test_samples=22, adversarial=0.1)


def batch(task: Segment, indices: list[int], part: str = "train") -> list[Tensor]:
    data = task.train_dataset() if part == "train" else task.test_dataset()
    return [torch.stack(values) for values in zip(*(data[i] for i in indices), strict=True)]


def test_a_canvas_is_a_function_of_its_part_and_number() -> None:
    torch.manual_seed(1)
    images, masks = batch(SMALL, [3, 5])
    torch.manual_seed(2)
    again, _ = batch(SMALL, [5, 3])
    assert torch.equal(images, again.flip(0))
    assert not torch.equal(images[0], images[1])
    assert not torch.equal(images, batch(SMALL, [3, 5], "test")[0]), "the parts have canvases of their own"
    assert (images.shape, masks.shape, masks.dtype) == ((2, 1, 32, 32), (2, 32, 32), torch.int64)
    assert torch.equal(masks > 0, images[:, 0] > 0), "each pixel with ink has a label, and no other has"
    assert len(SMALL.train_dataset()) == 40
    assert len(SMALL.test_dataset()) == 22


def test_the_parts_are_made_from_digits_of_their_own() -> None:
    train, test = (data.digits for data in (SMALL.train_dataset(), SMALL.test_dataset()))
    theirs = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in theirs for image in test)
    assert [len(train), len(test)] == [1437, 360]


def test_a_digit_is_labelled_with_what_it_is() -> None:
    one = Segment(canvas=32, digit_size=32, digits_per_canvas=1)
    images, masks = batch(one, list(range(30)), "test")
    small, labels = digits(train=False).tensors
    larger = F.interpolate(small / 255, size=32, mode="bilinear")
    for image, mask in zip(images, masks, strict=True):
        nearest = labels[(larger - image).square().sum((1, 2, 3)).argmin()]
        assert mask.unique().tolist() == [0, 1 + nearest]


@pytest.mark.parametrize(
    "option", [{"canvas": 16}, {"digit_size": 80}, {"adversarial": -1.0}, {"samples": 0}, {"discriminator_lr": -1.0}]
)
def test_refusals(option: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=f"--{next(iter(option)).replace('_', '-')} "):
        check_numbers(Segment(**option))


def gradients(task: Segment, model: nn.ModuleDict, loss: Tensor) -> dict[str, list[Tensor]]:
    model.zero_grad()
    loss.backward()
    zero = {name: [torch.zeros_like(p) for p in net.parameters()] for name, net in model.items()}
    return {
        name: [z if p.grad is None else p.grad.clone() for p, z in zip(net.parameters(), zero[name], strict=True)]
        for name, net in model.items()
    }


def test_each_network_learns_from_its_own_loss_only() -> None:
    """Against the loss as GANs are written with two backward passes; and the control, where nothing is detached."""
    torch.manual_seed(0)
    model, (images, masks) = SMALL.model(), batch(SMALL, [0, 1, 2, 3])
    assert isinstance(model, nn.ModuleDict)

    def verdict(maps: Tensor, true: bool) -> Tensor:
        logits = model["discriminator"](maps)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(true)))

    def logits() -> Tensor:
        torch.manual_seed(7)  # dropout
        return model["segmenter"](images.repeat(1, 3, 1, 1))["out"]

    torch.manual_seed(7)
    both = gradients(SMALL, model, SMALL.loss(model, (images, masks)))
    first = logits()
    theirs = F.cross_entropy(first, masks) + SMALL.adversarial * verdict(first.softmax(1), True)
    segmenter_alone = gradients(SMALL, model, theirs)["segmenter"]
    made = logits().softmax(1)
    truth = F.one_hot(masks, CLASSES).permute(0, 3, 1, 2).float()
    alone = gradients(SMALL, model, verdict(made.detach(), False) + verdict(truth, True))["discriminator"]
    torch.testing.assert_close(both["segmenter"], segmenter_alone, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(both["discriminator"], alone, rtol=1e-4, atol=1e-6)

    first = logits()
    mixed = F.cross_entropy(first, masks) + SMALL.adversarial * verdict(first.softmax(1), True)
    mixed = mixed + verdict(first.softmax(1), False) + verdict(truth, True)
    control = gradients(SMALL, model, mixed)
    for name, right in (("segmenter", segmenter_alone), ("discriminator", alone)):
        error, wrong = (sum((a - b).norm() for a, b in zip(g[name], right, strict=True)) for g in (both, control))
        assert wrong > 20 * error, f"without detaching, {name} learns something else"


def replica(module: nn.Module) -> nn.Module:
    """As `torch.nn.parallel.replicate` makes it for each GPU, here on the CPU."""
    modules: list[Any] = list(module.modules())
    copies = {id(each): each._replicate_for_data_parallel() for each in modules}
    views = {id(parameter): parameter.view_as(parameter) for parameter in module.parameters()}
    for each in modules:
        copied = copies[id(each)]
        copied._former_parameters = {}
        for name, child in each._modules.items():
            setattr(copied, name, copies[id(child)])
        for name, parameter in each._parameters.items():
            if parameter is None:
                copied._parameters[name] = None
            else:
                copied._former_parameters[name] = views[id(parameter)]
                setattr(copied, name, copied._former_parameters[name])
        for name, buffer in each._buffers.items():
            setattr(copied, name, buffer)
    return copies[id(module)]  # type: ignore[no-any-return]


def test_the_constants_of_a_network_are_its_parameters_and_tied_ones_stay_one() -> None:
    network = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    for module in (network, replica(network)):
        found = constants(module)
        assert found.keys() == {"0.weight", "2.weight", "2.bias"}
        assert found["0.weight"] is found["2.weight"]
        assert not any(value.requires_grad for value in found.values())
        x = torch.randn(2, 3, requires_grad=True)
        functional_call(module, found, (x,)).sum().backward()
        assert x.grad is not None
        assert all(parameter.grad is None for parameter in network.parameters())


def test_two_optimizers_with_a_schedule_of_their_own() -> None:
    model = SMALL.model()
    config = Config(lr=0.4, schedule="poly", optimizer="sgd", momentum=0.8, weight_decay=0.1)
    optimizers = SMALL.optimizers(model, config)
    Rates(optimizers).set(SMALL.rates(config, 50, 100))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    assert rates == pytest.approx([0.4 * 0.5**0.9, 0.5 * SMALL.discriminator_lr])
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["SGD", "Adam"]
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert len(held) == len(list(model.parameters()))
    assert SMALL.rates(Config(schedule="constant"), 50, 100) == [1.0, 1.0], "such a run may be prolonged"
    assert Classify().rates(config, 50, 100) == pytest.approx(0.5**0.9)
    with pytest.raises(Ended, match=r"^rates\(\) returned \[0.5\]: .* one for each of the 2 optimizers$"):
        Rates(optimizers).set([0.5])


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v3_large", "small"])
def test_a_micro_batch_of_one_sample_is_computed(backbone: Any) -> None:
    """As torchvision has it, DeepLab fails there, and the last micro-batch of an epoch may be such a one."""
    torch.manual_seed(0)
    net = segmenter(backbone)
    pooled = [name for name, module in net.named_modules() if isinstance(module, PooledNorm)]
    assert len(pooled) == 1
    before = net.get_submodule(pooled[0]).running_mean.clone()  # type: ignore[operator,union-attr]
    out = net(torch.rand(1, 3, 32, 32))["out"]
    out.mean().backward()
    assert out.shape == (1, CLASSES, 32, 32)
    assert torch.equal(net.get_submodule(pooled[0]).running_mean, before)  # type: ignore[arg-type]
    net(torch.rand(2, 3, 32, 32))
    assert not torch.equal(net.get_submodule(pooled[0]).running_mean, before)  # type: ignore[arg-type]


def test_the_control_for_it_and_the_names_are_torchvisions() -> None:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    stock = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        stock(torch.rand(1, 3, 32, 32))
    stock.load_state_dict(segmenter("mobilenet_v3_large").state_dict())


def test_the_mean_iou_is_that_of_all_pixels_of_all_images_and_not_a_mean_of_means() -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(0, 9, (5, 6, 7), generator=generator)  # classes 9 and 10 are in no image
    masks[0] = 0
    found = torch.where(torch.rand(masks.shape, generator=generator) < 0.3, 2, masks)
    counts = confusion(found, masks)
    assert counts.dtype == torch.float64
    assert counts.sum((1, 2)).tolist() == [42] * 5
    assert counts[1, 3, 2] == ((masks[1] == 3) & (found[1] == 2)).sum()
    zero = torch.zeros((), dtype=torch.float64)
    said = SMALL.summarize({"confusion": counts.mean(0), "loss": zero, "adversarial": zero})

    def iou(found: Tensor, masks: Tensor) -> float:
        each = [
            float(((found == c) & (masks == c)).sum() / ((found == c) | (masks == c)).sum())
            for c in range(CLASSES)
            if ((found == c) | (masks == c)).any()
        ]
        return sum(each) / len(each)

    assert said["miou"] == pytest.approx(iou(found, masks), rel=1e-6)
    assert said["pixel_accuracy"] == pytest.approx(float((found == masks).double().mean()), rel=1e-12)
    mean_of_means = sum(iou(f, m) for f, m in zip(found, masks, strict=True)) / 5
    assert abs(mean_of_means - said["miou"]) > 0.01


def test_the_pixel_loss_is_cross_entropy_and_a_mask_is_a_map() -> None:
    logits, masks = torch.randn(2, CLASSES, 4, 5), torch.randint(0, CLASSES, (2, 4, 5))
    stock = F.cross_entropy(logits, masks, reduction="none").flatten(1)
    torch.testing.assert_close(pixel_loss(logits, masks), stock)
    assert torch.equal(one_hot(masks).argmax(1), masks)

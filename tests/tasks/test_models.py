"""Networks by name: that each of torchvision's can be built, sized and given a new head, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode

from evenkeel.common.errors import Refusal
from evenkeel.tasks.models import (
    AUXILIARY,
    SmallCNN,
    check_model_name,
    outputs_of,
    published_weights,
    replace_head,
    torchvision_model,
)
from tests.support.raised import refusal_of

ONE_OF_EACH_FAMILY = [
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t"),
    *("mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnet18", "shufflenet_v2_x0_5"),
    *("squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_32"),
]


def made_for(name: str) -> int:
    return int(published_weights(name).transforms().crop_size[0])


class WithoutMemory(TorchFunctionMode):
    """Parameters without values. `torch.device("meta")` would not do: RegNets compute their shapes with tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **where})


def test_each_network_is_of_one_of_these_families() -> None:
    def families(names: list[str]) -> set[str]:
        return {torchvision.models.get_model_builder(name).__module__ for name in names}

    assert families(ONE_OF_EACH_FAMILY) == families(torchvision.models.list_models(module=torchvision.models))


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_a_classification_network_gets_a_head_of_ten_classes(name: str) -> None:
    options = {"aux_logits": False, "init_weights": False} if name in AUXILIARY else {}
    with WithoutMemory():
        model = torchvision.models.get_model(name, weights=None, **options)
        replace_head(model, 1000, 10)  # asserts that there is one to replace
    last = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))][-1]
    assert outputs_of(last) == 10


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_a_network_runs_on_images_of_the_size_it_was_made_for(name: str) -> None:
    """Building it runs it without values; that of a wrong size must fail, so the right one is no accident."""
    with WithoutMemory():
        torchvision_model(name, 10, made_for(name))
        with pytest.raises(
            Refusal, match=rf"^--model {name}: does not take images of 0 x 0 \(.+\); use --image-size \d+"
        ):
            torchvision_model(name, 10, 0)


def test_small_images_for_a_network_of_large_ones_name_the_size_to_give() -> None:
    caught = refusal_of(torchvision_model, "inception_v3", 10, 32)
    assert caught.startswith("--model inception_v3: does not take images of 32 x 32 (")
    assert caught.endswith("use --image-size 299, the size it was made for")
    assert "use --image-size 224" in refusal_of(torchvision_model, "vit_b_16", 10, 40)
    with pytest.raises(Refusal, match=r"its published weights are for one size\); use --image-size 224"):
        torchvision_model("vit_b_16", 10, 32, published_weights("vit_b_16"))


def test_an_unknown_network_names_those_that_look_like_it() -> None:
    with pytest.raises(Refusal, match=r"^--model resnet19: is neither cnn nor .*; did you mean resnet1.* or "):
        check_model_name("resnet19")
    with pytest.raises(Refusal, match=r"^--model zzzzzz: .*examples: resnet18"):
        check_model_name("zzzzzz")
    with pytest.raises(Refusal):
        check_model_name("deeplabv3_resnet50")  # is no classifier
    check_model_name("cnn")


def test_trying_a_size_draws_no_random_numbers_and_leaves_the_statistics() -> None:
    torch.manual_seed(3)
    plain = torchvision.models.get_model("mobilenet_v3_small", num_classes=10)  # it has dropout
    after = torch.rand(())
    torch.manual_seed(3)
    tried = torchvision_model("mobilenet_v3_small", 10, 32)
    assert torch.equal(after, torch.rand(()))
    for (name, one), other in zip(plain.state_dict().items(), tried.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("name", AUXILIARY)
def test_pretrained_networks_lose_auxiliary_outputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = published_weights(name)
    # a file of all of the network's tensors, each of one number; both outputs are in the published files
    with WithoutMemory():
        whole = torchvision.models.get_model(name, aux_logits=True, init_weights=False).state_dict()
    small = {key: torch.full((), 0.5).to(tensor.dtype).expand(tensor.shape) for key, tensor in whole.items()}
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / weights.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    torch.save(small, file)
    model = torchvision_model(name, 10, made_for(name), weights)
    left = dict(model.named_parameters())
    assert [key for key in left if key.lower().startswith("aux")] == []
    assert set(left) < set(whole)
    assert all((left[key] == 0.5).all() for key in left if not key.startswith("fc.") and "conv" in key)
    assert left["fc.weight"].shape[0] == 10
    size = made_for(name)
    with torch.device("meta"):
        image = torch.empty(2, 3, size, size)
    outputs = model.to("meta")(image)
    assert outputs.shape == (2, 10), "a tensor, also in training"


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32), (3, 224), (3, 2), (3, 45)])
def test_the_small_cnn_takes_any_size(channels: int, size: int) -> None:
    model = SmallCNN(5, width=4, channels=channels, size=size)
    assert model(torch.randn(2, channels, size, size)).shape == (2, 5)
    assert model.classifier.in_features <= 8 * 31**2

"""Networks by name: a small CNN of our own, and torchvision's for classification.

torchvision is imported where it is asked for, because that takes as long as importing torch.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from .errors import Refusal

OWN = "cnn"
"""The name of :class:`SmallCNN`. All others are torchvision's."""

AUXILIARY = ("googlenet", "inception_v3")
"""Networks that in training have outputs beside the main one."""


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer, for small images.

    Args:
        classes: number of outputs.
        width: channels of the first convolution; the second has twice as many.
        dropout: probability of dropping a feature before the last layer.
        channels: of an image.
        size: height and width of an image, in pixels; at least 2.

    Shape:
        [n, channels, size, size] -> [n, classes], unnormalised log-probabilities.
    """

    def __init__(self, classes: int, width: int = 32, dropout: float = 0.0, channels: int = 1, size: int = 8) -> None:
        super().__init__()
        pool = max(2, size // 16)  # at most 31 x 31 values of a channel are left for the linear layer
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(pool),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.classifier = nn.Linear(2 * width * (size // pool) ** 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images."""
        return self.classifier(self.features(images))  # type: ignore[no-any-return]


def model_names() -> list[str]:
    """Every name that --model knows."""
    import torchvision

    return [OWN, *torchvision.models.list_models(module=torchvision.models)]


def check_model_name(name: str) -> None:
    """Refuse a name that is none, with those that look like it."""
    if name == OWN or name in (names := model_names()):
        return
    near = difflib.get_close_matches(name.lower(), names, n=3)
    hint = f"perhaps {' or '.join(near)}" if near else f"{OWN}, or one of torchvision's: resnet18, vit_b_16 ..."
    raise Refusal(f"--model {name}: is neither {OWN} nor a classification model of torchvision; {hint}")


def published_weights(name: str) -> Any:
    """torchvision's best weights of a network, a member of its `WeightsEnum`.

    Raises:
        Refusal: there are none.
    """
    if name != OWN:
        import torchvision

        weights = getattr(torchvision.models.get_model_weights(name), "DEFAULT", None)
        if weights is not None:
            return weights
    raise Refusal(f"--pretrained: there are no published weights of --model {name}; take a model of torchvision's")


def torchvision_model(name: str, classes: int, size: int, weights: Any = None) -> nn.Module:
    """One of torchvision's networks, for so many classes and for images of three channels and so many pixels a side.

    Args:
        name: one of :func:`model_names`, but not our own.
        classes: outputs.
        size: height and width of the images.
        weights: of :func:`published_weights`, whose file is in torch's cache; the head for other classes is random.

    Raises:
        Refusal: the network does not take images of that size; says which size it was made for.
    """
    import torchvision

    options: dict[str, Any] = {}
    if name.startswith(("vit_", "maxvit")) and weights is not None and size != _made_for(name):
        raise _refused_size(name, size, "its published weights are for one size")
    if name.startswith("vit_"):
        options["image_size"] = size  # is part of its shape
    if name.startswith("maxvit"):
        options["input_size"] = (size, size)
    if name in AUXILIARY and weights is None:  # with weights torchvision decides, and wants to hear of neither
        options |= {"aux_logits": True, "init_weights": True}
    if weights is not None:
        model = _pretrained(name, weights, options)
        if name in AUXILIARY:
            _without_auxiliary(model)
        replace_head(model, len(weights.meta["categories"]), classes)
    try:
        if weights is None:
            model = torchvision.models.get_model(name, num_classes=classes, **options)
        try_shape(model, (2, 3, size, size))
    except (ValueError, RuntimeError, AssertionError) as error:
        raise _refused_size(name, size, str(error).strip().split("\n")[0] or type(error).__name__) from None
    return model


def _pretrained(name: str, weights: Any, options: dict[str, Any]) -> nn.Module:
    import torchvision

    try:
        with _no_code_in_files():
            return torchvision.models.get_model(name, weights=weights, **options)  # type: ignore[no-any-return]
    except (RuntimeError, OSError, EOFError, KeyError, UnpicklingError, BadZipFile) as error:
        file = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Refusal(
            f"--pretrained --model {name}: {file} cannot be read ({reason}); remove it, to download it again"
        ) from None


def _without_auxiliary(model: Any) -> None:
    """Take the auxiliary outputs off; the ways in which torchvision does it differ between the networks."""
    model.aux_logits = False
    for head in ("AuxLogits", "aux1", "aux2"):
        if hasattr(model, head):
            setattr(model, head, None)


@contextlib.contextmanager
def _no_code_in_files() -> Iterator[None]:
    """Let torch read tensors from a file, and nothing else; torchvision does not ask it to."""
    name, other = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = {variable: os.environ.pop(variable, None) for variable in (name, other)}
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({variable: value for variable, value in before.items() if value is not None})


def _refused_size(name: str, size: int, reason: str) -> Refusal:
    return Refusal(
        f"--model {name}: does not take images of {size} x {size} ({reason}); "
        f"--image-size {_made_for(name)} makes them as large as those it was made for"
    )


def replace_head(model: nn.Module, old: int, classes: int) -> None:
    """Put a new last layer, with random weights, in place of the one with ``old`` outputs."""
    heads = [name for name, module in model.named_modules() if _outputs(module) == old]
    assert len(heads) == 1, heads  # true of all of torchvision's, and tests/test_models.py says so
    parent = model.get_submodule(heads[0].rpartition(".")[0])
    name = heads[0].rpartition(".")[2]
    head: Any = getattr(parent, name)
    if isinstance(head, nn.Linear):
        new: nn.Module = nn.Linear(head.in_features, classes)
    else:
        new = nn.Conv2d(head.in_channels, classes, head.kernel_size, head.stride, head.padding)
    setattr(parent, name, new)


def _outputs(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.out_channels if isinstance(module, nn.Conv2d) else 0


def try_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Run the network on images without values, which takes no time and no memory; raises what that raises."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.func.functional_call(model, empty, (torch.empty(shape, device="meta"),))


def _made_for(name: str) -> int:
    """Height and width of the images on which torchvision has measured a network's weights."""
    import torchvision

    weights = getattr(torchvision.models.get_model_weights(name), "DEFAULT", None)
    return int(weights.transforms().crop_size[0]) if weights else 224

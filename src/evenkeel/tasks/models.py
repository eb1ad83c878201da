"""Networks by name: a small CNN of our own, and torchvision's for classification.

torchvision is imported where it is used, because that takes as long as importing torch.
"""

from __future__ import annotations

import difflib
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor, nn

from ..common import keeper_link
from ..common.errors import Refusal
from .downloads import fetch_weights

OWN = "cnn"
"""The name of :class:`SmallCNN`. All others are torchvision's."""

AUXILIARY = ("googlenet", "inception_v3")
"""Networks that have auxiliary outputs in training."""


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer, for small images: [n, channels, size, size] -> logits [n, classes].

    The first convolution has `width` channels, the second twice as many; `size` is at least 2.
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


def check_model_name(name: str) -> None:
    """Refuse an unknown name, and suggest similar ones."""
    if name == OWN:
        return
    import torchvision  # takes seconds, and the default job does not need it

    if name in (names := torchvision.models.list_models(module=torchvision.models)):
        return
    near = difflib.get_close_matches(name.lower(), [OWN, *names], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "examples: resnet18, vit_b_16"
    raise Refusal(f"--model {name}: is neither {OWN} nor a classification model of torchvision; {hint}")


def published_weights(name: str) -> Any:
    """torchvision's best weights of a network, a member of its `WeightsEnum`; refused if there are none."""
    if weights := _best_weights(name):
        return weights
    raise Refusal(f"--pretrained: there are no published weights of --model {name}; choose a model of torchvision")


def _best_weights(name: str) -> Any:
    import torchvision

    return None if name == OWN else getattr(torchvision.models.get_model_weights(name), "DEFAULT", None)


def torchvision_model(name: str, classes: int, size: int, weights: Any = None) -> nn.Module:
    """One of torchvision's networks, for images [n, 3, size, size]; with published weights the last layer is new.

    Raises:
        Refusal: the network does not take images of that size, or its weights cannot be downloaded or read.
    """
    import torchvision

    # for these the size is a part of their shape
    sized: dict[str, Any] = {"vit": {"image_size": size}, "maxvit": {"input_size": (size, size)}}
    options = sized.get(name.partition("_")[0], {})
    weights_for = _best_weights(name)
    made_for = weights_for.transforms().crop_size[0] if weights_for else 224
    try:
        if weights is None:
            if name in AUXILIARY:
                options = {"aux_logits": True, "init_weights": True}
            model: nn.Module = torchvision.models.get_model(name, num_classes=classes, **options)
        else:
            if options and size != made_for:
                raise ValueError("its published weights are for one size")
            model = _pretrained(name, weights)
            replace_head(model, len(weights.meta["categories"]), classes)
        if not keeper_link.restarts():  # it has been tried before
            try_shape(model, (2, 3, size, size))
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Refusal(
            f"--model {name}: does not take images of {size} x {size} ({reason}); use --image-size {made_for}, the "
            "size it was made for"
        ) from None
    return model


def _pretrained(name: str, weights: Any) -> Any:
    """A network with its published weights, without auxiliary outputs."""
    import torchvision

    file = fetch_weights(weights, name)
    try:
        # torchvision unpickles anything in the file, so check that it has only tensors
        torch.load(file, map_location="meta", weights_only=True)
        model = torchvision.models.get_model(name, weights=weights)
    except (RuntimeError, OSError, EOFError, KeyError, UnpicklingError, BadZipFile) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise Refusal(
            f"--pretrained --model {name}: cannot read {file} ({reason}); delete it to download it again"
        ) from None
    if name == "inception_v3":  # torchvision does this for googlenet only
        model.aux_logits, model.AuxLogits = False, None
    return model


def replace_head(model: nn.Module, old: int, classes: int) -> None:
    """Put a new last layer, with random weights, in place of the one with ``old`` outputs."""
    (path,) = [name for name, module in model.named_modules() if outputs_of(module) == old]
    parent, _, name = path.rpartition(".")
    head: Any = model.get_submodule(path)
    if isinstance(head, nn.Linear):
        new: nn.Module = nn.Linear(head.in_features, classes)
    else:
        new = nn.Conv2d(head.in_channels, classes, head.kernel_size, head.stride, head.padding)
    setattr(model.get_submodule(parent), name, new)


def outputs_of(module: nn.Module) -> int:
    """Output features or channels of a linear or convolutional layer; 0 for any other."""
    return int(getattr(module, "out_features", 0) or getattr(module, "out_channels", 0))


def try_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Run the network on meta tensors, which takes no time and no memory; raises its errors."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.func.functional_call(model, empty, (torch.empty(shape, device="meta"),))

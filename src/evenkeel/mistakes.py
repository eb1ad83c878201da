"""What people's tasks get wrong, said in a line that names the thing and the remedy.

Autograd, DDP and the collating of samples notice most of it late, if at all, and in words about themselves: a loss that
is a vector trains on its sum; a parameter without a gradient may let other ranks wait for ever.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset, default_collate

from .compilation import SHAPES, too_many_shapes
from .errors import EndedByData, EndedHere, Refusal

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",  # torch's allocator on the CPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

TOO_FEW = "Expected more than 1 value per channel when training"
"""What BatchNorm says of one sample."""

MANY = 5
"""Names of parameters that a line bears."""


class Uncollated(EndedByData):
    """Samples that do not make a batch."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, the device's or the host's; torch has no common type for them."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def length(dataset: Any, method: str) -> int:
    """How many samples a data set has.

    Args:
        dataset: what a task returned.
        method: of the task that returned it, for the message.

    Raises:
        Refusal: it is not a map-style data set.
    """
    lacks = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if isinstance(dataset, IterableDataset) or lacks:
        why = f"has no {' and no '.join(lacks)}" if lacks else "is an IterableDataset"
        raise Refusal(
            f"{method}() returned {kind_of(dataset)}, which {why}: samples are dealt out by their numbers, "
            "and a run may go on at any; return a map-style data set, with __len__ and __getitem__(number)"
        )
    try:
        return len(dataset)
    except Exception as error:  # a negative one, one beyond 2**63, none at all
        raise Refusal(
            f"{method}() returned {kind_of(dataset)}, whose __len__ fails ({type(error).__name__}: {error}); it must "
            "return the number of samples"
        ) from error


def check_model(model: Any, learns: bool = True) -> None:
    """Refuse what cannot be trained.

    Args:
        model: what a task returned.
        learns: it is to be trained, and not only evaluated.

    Raises:
        Refusal: no module, one whose values are not there yet, or one without a parameter that needs a gradient.
    """
    if not isinstance(model, nn.Module):
        raise Refusal(f"model() returned {kind_of(model)}: it must return an nn.Module")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise Refusal(
                f"model() returned {kind_of(model)} whose {name} has no shape yet: call it in model() with a batch of "
                "zeros once, or give its lazy layers their sizes"
            )
        if tensor.is_meta:
            raise Refusal(
                f"model() returned {kind_of(model)} whose {name} is on the meta device, without values: build it on "
                "the CPU"
            )
    parameters = list(model.parameters())
    if learns and not any(parameter.requires_grad for parameter in parameters):
        why = f"requires_grad is False for all {len(parameters)} of them" if parameters else "it has none at all"
        raise Refusal(
            f"model() returned {kind_of(model)} without a parameter that needs a gradient ({why}): there is "
            "nothing to train; let requires_grad be True where the model should learn"
        )


def checked_loss(loss: Any) -> Tensor:
    """A task's loss, if it is one.

    Raises:
        EndedHere: it is no scalar tensor with a gradient.
    """
    if not isinstance(loss, Tensor):
        hint = "; add up its values" if isinstance(loss, (Mapping, Sequence)) else ""
        raise EndedHere(f"loss() returned {kind_of(loss)}: it must return one scalar tensor{hint}")
    if loss.numel() != 1:
        raise EndedHere(
            f"loss() returned a tensor of shape {list(loss.shape)}: it must return a scalar, the mean over the batch's "
            "samples (.mean(), or reduction='mean')"
        )
    if loss.is_complex():
        raise EndedHere("loss() returned a complex number: it must return a real one, by .abs() or .real")
    if not loss.requires_grad:
        raise EndedHere(
            "loss() returned a tensor without a gradient: it does not depend on the model's parameters, or was made "
            "under torch.no_grad(), from .detach() or .item(), or made anew by torch.tensor()"
        )
    return loss


def missing_gradients(model: nn.Module) -> EndedHere:
    """The error for a step after whose backward passes not all parameters that learn have a gradient of their own.

    Where DDP waits for one that does not come, it reduces nothing and says so in the next step only. By then this rank
    would have committed a step of its own, and the others would wait.
    """
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return EndedHere(_unused(missing, sum(p.requires_grad for p in model.parameters())))


def explain(error: BaseException, model: nn.Module) -> None:
    """Raise in a line what DDP says in a paragraph, and BatchNorm of itself; return if it is something else.

    Raises:
        EndedHere: some parameters had no gradient in the step before, or a micro-batch was too small for BatchNorm.
    """
    if TOO_FEW in str(error):
        raise EndedHere(
            f"a micro-batch has too few samples for BatchNorm in training ({error}); take another --batch-size or "
            "--micro-batch, one that leaves no single sample (python -m evenkeel plan shows the sizes), or freeze the "
            "layer"
        ) from error
    if too_many_shapes(error):
        raise EndedHere(
            f"--compile: a network has been compiled for {SHAPES} shapes, and here is another one; uncompiled its last "
            "bits would be others. Pad batches to a few shapes, or leave --compile out"
        ) from error
    if "Expected to have finished reduction in the prior iteration" in str(error):
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        places = [int(place) for place in told[1].split()] if told else []
        missing = [names[place] for place in places if place < len(names)]
        raise EndedHere(_unused(missing, len(names))) from error


def explain_samples(samples: Sequence[Any], error: BaseException) -> str:
    """Why a list of samples does not make a batch."""
    where, trouble = _trouble([(str(number), sample) for number, sample in enumerate(samples)], "")
    trouble = trouble or f"default_collate fails: {str(error).splitlines()[0]}"
    return f"the data set's samples cannot be made a batch: {where or 'a sample'} {trouble}"


def exhausted(what: str, error: StopIteration) -> EndedByData:
    """The error for code of a task's that lets a StopIteration out, which a loop would take for its own end."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return EndedByData(
        f"{what} raised StopIteration at {frame.filename}:{frame.lineno}: an iterator there is at its end; give "
        "next() a second argument, or take samples by their numbers"
    )


def _trouble(column: Sequence[tuple[str, Any]], path: str) -> tuple[str, str]:
    """(where, what is wrong) with the things that stand at one place in all samples; empty if nothing is."""
    values = [value for _, value in column]
    name = f"sample{path}" if path else "a sample"
    kinds = sorted({type(value).__name__ for value in values})
    first = values[0]
    if isinstance(first, Mapping):
        for key in first:
            if not all(isinstance(value, Mapping) and key in value for value in values):
                return f"sample{path}[{key!r}]", "is not there in every sample; give all samples the same keys"
            found = _trouble([(number, value[key]) for number, value in column], f"{path}[{key!r}]")
            if found[1]:
                return found
        return "", ""
    if isinstance(first, (list, tuple)):
        lengths = sorted({len(value) if isinstance(value, (list, tuple)) else -1 for value in values})
        if len(lengths) > 1:
            return name, f"has {lengths[0]} parts in one sample and {lengths[-1]} in another; give all the same number"
        for place in range(len(first)):
            found = _trouble([(number, value[place]) for number, value in column], f"{path}[{place}]")
            if found[1]:
                return found
        return "", ""
    shapes = sorted({tuple(value.shape) for value in values if isinstance(value, (Tensor, np.ndarray))})
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in (shapes[0], shapes[-1]))
        return name, (
            f"has different sizes, {shown}: resize, crop or pad them to one, or give the data set a __getitems__ that "
            "returns a batch of its own making"
        )
    for value in values:
        if remedy := _remedy(value):
            return name, f"is {kind_of(value)}: {remedy}"
    return name, f"is of different types: {', '.join(kinds)}; return the same from all samples" if len(
        kinds
    ) > 1 else ""


def _remedy(value: Any) -> str:
    """What to return instead of something that makes no batch; empty for what does."""
    if value is None:
        return "return a number or a tensor that stands for nothing (-1, say), or leave that part out of all samples"
    if type(value).__module__.partition(".")[0] == "PIL":
        return "make it a tensor in the data set's transform, by torchvision.transforms.v2.ToImage() or PILToTensor()"
    if dataclasses.is_dataclass(value):
        return "return a dict, by dataclasses.asdict(sample), a tuple or a named tuple"
    try:
        default_collate([value])
    except Exception:
        return "return tensors, arrays, numbers, texts, or dicts, lists and tuples of them"
    return ""


def _unused(missing: Sequence[str], of: int) -> str:
    named = f": {listed(missing)}" if missing else ""
    return (
        f"{len(missing) or 'some'} of the model's {of} parameters got no gradient from loss(){named}; use them in the "
        "loss, freeze them by requires_grad_(False), or set unused_parameters = True in the task's class if it is some "
        "steps only that do not use them"
    )


def listed(names: Sequence[str]) -> str:
    """Names in a line, the first few of many."""
    return ", ".join(names[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")


def kind_of(value: Any) -> str:
    """What something is, for a line: "a list"."""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"

"""Mistakes in tasks, each reported in one line that names the value and the remedy.

torch notices most of them late or never, and its messages are about its internals: a vector loss trains on its sum; a
parameter without a gradient may make other ranks wait forever; a metric of the wrong shape fails after an epoch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, SparseAdam

from ..common.errors import Ended, EndedHere, Refusal, place_of
from ..common.naming import TRAIN, kind_of, listed
from ..distributed.causes import NO_GPU
from ..distributed.reduction import is_dense
from .compilation import SHAPES

TOO_FEW = "Expected more than 1 value per channel when training"
"""BatchNorm's error message for one sample."""

INPLACE = "modified by an inplace operation"
DENSE = "ranks add up dense gradients only: leave sparse=True out, and take Adam instead of SparseAdam"

TAKEN = {"loss", "grad_norm", "lr", "samples_per_s", "tokens_per_s", "mfu", "data_wait", "scale", "overflows"}
"""Names that are already in a training line of metrics."""


def check_model(model: Any, learns: bool = True, on_meta: bool = False) -> None:
    """Refuse what `model()` returned if it cannot be trained, or with ``learns=False`` evaluated; ``on_meta``: it was
    built without values, on purpose."""
    returned = f"model() returned {kind_of(model)}"
    if not isinstance(model, nn.Module):
        raise Refusal(
            f"{returned}: it must return an nn.Module" + (f", as {model.__name__}()" if isinstance(model, type) else "")
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise Refusal(f"{returned} whose {name} has no shape yet: call it once in model() with a batch of zeros")
        if tensor.is_meta and not on_meta:
            raise Refusal(f"{returned} whose {name} is on the meta device, without values: build it on the CPU")
        if learns and tensor.requires_grad and tensor.is_complex():
            raise Refusal(
                f"{returned} whose {name} is a complex parameter, whose gradients cannot be added over ranks: store "
                "torch.view_as_real of it, and use torch.view_as_complex in forward()"
            )
    for name, it in model.state_dict().items():
        what = f"{returned} whose state_dict() has {name}, {kind_of(it)}, but checkpoints have dense tensors only: "
        if quantised(it):
            raise Refusal(
                f"{what}train it first and quantise the exported model, or use prepare_qat (fake quantisation)"
            )
        if not isinstance(it, Tensor):
            raise Refusal(f"{what}return a tensor from get_extra_state(), or none")
        if learns and it.layout is not torch.strided:
            raise Refusal(f"{what}register it with persistent=False, and create it in model()")
        strides = zip(it.shape, it.stride(), strict=True) if learns and it.numel() else ()
        if any(size > 1 and not stride for size, stride in strides):
            raise Refusal(
                f"{returned} whose {name} is an expanded tensor, which cannot be loaded: clone() it in model()"
            )
    parameters = list(model.parameters())
    if learns and not any(parameter.requires_grad for parameter in parameters):
        why = f"requires_grad is False for all {len(parameters)} of them" if parameters else "it has none at all"
        raise Refusal(
            f"{returned} without a parameter that requires a gradient ({why}): there is nothing to train; set "
            "requires_grad=True for the parameters to train"
        )


def quantised(value: Any) -> bool:
    """Whether an entry of a state dict is from a quantised module: its weights, their dtype or packed parameters."""
    if isinstance(value, Tensor):
        return value.is_quantized
    if isinstance(value, tuple):
        return any(map(quantised, value))
    return isinstance(value, (torch.dtype, torch.ScriptObject))


def check_buffers(model: nn.Module, live: Mapping[str, Tensor], committed: Mapping[str, Tensor]) -> None:
    """Check that a forward pass has changed buffers in place; tensors that replace them would not be saved.

    Args:
        model: after the pass.
        live: its buffers by name, as they were before the first step.
        committed: their values then.
    """
    now = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in live.items():
        found = now.get(name)
        if found is not None and found.shape != committed[name].shape:
            raise EndedHere(
                f"the model's buffer {name} changes its shape in training, from {list(committed[name].shape)} to "
                f"{list(found.shape)}: give it its final shape in model()"
            )
        if found is not buffer:
            raise EndedHere(
                f"the model's buffer {name} is replaced by another tensor in training, which is not saved: change it "
                "in place (copy_, add_)"
            )


def checked_optimizers(returned: Any, model: nn.Module) -> list[Optimizer]:
    """The result of `optimizers()`, as a list; refused if they would not train the model, or could not be saved."""
    optimizers = [returned] if isinstance(returned, Optimizer) else returned
    if not isinstance(optimizers, (list, tuple)):
        raise Refusal(f"optimizers() returned {kind_of(returned)}: it must return a list of torch.optim.Optimizer")
    if not optimizers:
        raise Refusal("optimizers() returned an empty list: nothing would be trained; return at least one")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise Refusal(f"{name or 'the model'} is {kind_of(module)} with sparse=True, and {DENSE}")
    taken: dict[int, str] = {}
    for number, optimizer in enumerate(optimizers):
        which = f"optimizers()[{number}]"
        if not isinstance(optimizer, Optimizer):
            raise Refusal(f"{which} is {kind_of(optimizer)}: it must be a torch.optim.Optimizer")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure and closure.default is closure.empty:  # LBFGS
            raise Refusal(f"{which} is {kind_of(optimizer)}, whose step() needs a closure: use another optimizer")
        if isinstance(optimizer, SparseAdam):
            raise Refusal(f"{which} is a SparseAdam, and {DENSE}")
        for group in optimizer.param_groups:
            if not isinstance(lr := group.get("lr"), (Real, Tensor)):
                raise Refusal(
                    f"{which} has lr = {lr!r}, but each step sets it, to that number times the schedule's factor: give "
                    "it a number (of Adafactor with relative_step=False)"
                )
            for option, value in group.items():
                for part in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(part, np.generic):  # torch.load with weights_only refuses them
                        raise Refusal(
                            f"{which} has {option} = {part!r}, a NumPy number, which cannot be loaded from a "
                            "checkpoint: convert it with float()"
                        )
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise Refusal(
                        f"{which} has a parameter of shape {list(parameter.shape)} that is not in the model and would "
                        "never be saved: build optimizers from the `model` that the method gets"
                    )
                if group.get("fused") and not is_dense(parameter):
                    raise Refusal(
                        f"{which} has fused=True, which passes over the gaps in the memory of {names[id(parameter)]}: "
                        "make that parameter of a .contiguous() tensor, or leave fused out"
                    )
                if (first := taken.setdefault(id(parameter), which)) != which:
                    name = names[id(parameter)]
                    raise Refusal(f"{name} is in {first} and in {which}: both would step it; keep it in one")
    return list(optimizers)


def checked_losses(returned: Any, trains: bool = True, of: str = "loss()") -> tuple[Tensor, dict[str, Tensor]]:
    """The result of `loss()`, or of the method `of`: the loss, and its parts as scalars without a gradient.

    With ``trains=False`` the loss is used as a metric: any tensor is accepted here.
    """
    both = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    loss, given = returned if both else (returned, {})
    loss, parts = checked_loss(loss, trains, of), {}
    for full, value in _by_name(given, f"{of} returned", "scalars").items():
        name = full.removeprefix(f"{TRAIN}/")
        if name in TAKEN or name in parts or not name:
            raise EndedHere(f"{of} returned a part named {full!r}, a name that training already logs: rename it")
        number = value if isinstance(value, Tensor) else torch.empty(0)
        if isinstance(value, Real):  # created on the loss's device: a copy would make the host wait
            number = torch.full((), float(value), device=getattr(loss, "device", None))
        if number.numel() != 1 or number.is_complex():
            raise EndedHere(
                f"{of} returned {_shape_of(value)} as its part '{name}': it must be one real number, the mean over "
                "the batch's samples"
            )
        parts[name] = number.detach().reshape(())
    return loss, parts


def takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a task's method has an optional parameter: `step` of a loss, `samples` of a summary."""
    return name in inspect.signature(method).parameters


def same_parts(known: Sequence[str], others: Sequence[str], kind: type[Ended] = EndedHere) -> None:
    """Check that the parts of two batches' losses have the same names, in the same order."""
    if tuple(known) != tuple(others):
        raise kind(
            f"loss() returned the parts ({', '.join(known)}) for one batch and ({', '.join(others)}) for another: it "
            "must return the same names, in the same order"
        )


def checked_loss(loss: Any, trains: bool = True, of: str = "loss()") -> Tensor:
    """The result of `loss()` or the method `of`, if it is a real scalar with a gradient; with ``trains=False`` any
    tensor is accepted."""
    if not isinstance(loss, Tensor):
        hint = "; add up its values, or return (loss, {name: part})" if isinstance(loss, (Mapping, Sequence)) else ""
        hint = "; leave out .item() or float(), which lose the gradient" if isinstance(loss, Real) else hint
        hint = "; is a `return` missing?" if loss is None else hint
        raise EndedHere(f"{of} returned {kind_of(loss)}: it must return one scalar tensor{hint}")
    if not trains:
        return loss
    if loss.numel() != 1:
        raise EndedHere(
            f"{of} returned a tensor of shape {list(loss.shape)}: it must return a scalar, the mean over the batch's "
            "samples (.mean(), or reduction='mean')"
        )
    if loss.is_complex():
        raise EndedHere(f"{of} returned a complex number: it must return a real one, by .abs() or .real")
    if not loss.requires_grad:
        raise EndedHere(
            f"{of} returned a tensor without a gradient: it does not depend on the model's parameters, or was made "
            "under torch.no_grad(), from .detach() or .item(), or by torch.tensor()"
        )
    return loss


def wrong_step() -> EndedHere:
    """The error for a loop of the user's own that does not take each step once: samples would be repeated or missed."""
    return EndedHere(
        "call model.step(norm) exactly once for each step of run.steps(), after all of model.micro_batches(step); to "
        "leave out a step, pass an infinite norm, with --on-nonfinite skip"
    )


def wrong_backward(calls: int) -> EndedHere:
    """The error for a loop of the user's own that does not pass each micro-batch to `DistributedLoss.backward` once."""
    return EndedHere(
        f"model.backward(loss) was called {calls} times for a micro-batch: call it once, with the sum of its losses, "
        "in place of loss.backward(), whose gradient would grow with the number of micro-batches"
    )


def missing_gradients(model: nn.Module) -> EndedHere:
    """The error for a step in which parameters got no gradient.

    DDP then reduces nothing, and reports this only in the next step, when this rank has committed an unreduced one.
    """
    learning = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    return _unused([name for name, gradient in learning if gradient is None], len(learning))


def check_dense(parameters: Sequence[Tensor]) -> None:
    """Check that no gradient is sparse; DDP would notice, but a single process would not."""
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise EndedHere(f"a gradient is sparse, and {DENSE}")


TWICE = "backward through the graph a second time"
"""What torch says where a loss keeps a graph."""

KNOWN = {
    TOO_FEW: "a micro-batch has too few samples for BatchNorm in training ({error}); use another --batch-size or "
    "--micro-batch, one that leaves no single sample (python -m evenkeel plan shows the sizes), or freeze the layer",
    "FailOnRecompileLimitHit: ": f"--compile: a network has been compiled for {SHAPES} shapes, and this is a new one; "
    "uncompiled, its last bits would differ. Pad batches to a few shapes, or leave --compile out",
    "does not currently support double backward": "--compile: the loss takes the gradient of a gradient "
    "(create_graph=True), which compiled networks do not support; leave --compile out",
    "CheckpointError: ": "--checkpoint-activations: a block computed something else in the backward pass, so it "
    "depends on more than its inputs, weights, buffers and random numbers; leave it out in the task's blocks(model)",
    INPLACE: "--checkpoint-activations: the input of a block is changed in place, in the block or after it "
    "(ReLU(inplace=True), +=); return a new tensor there, or leave that block out in the task's blocks(model)",
    "SparseTensorImpl": f"a gradient is sparse, and {DENSE}",  # in DDP's buckets
    TWICE: "the loss depends on what an earlier backward pass has freed: detach "
    "what is used in more than one step or micro-batch (self.last = loss.detach())",
}
"""What long errors of DDP, BatchNorm, dynamo or torch.utils.checkpoint contain -> a line."""


def raise_explained(error: BaseException, model: nn.Module) -> None:
    """Raise a one-line error for a known long one; return for all others."""
    text, recomputes = f"{type(error).__name__}: {error}", any(hasattr(it, "_recomputes") for it in model.modules())
    for part, line in KNOWN.items():
        if part in text and (part != INPLACE or recomputes):
            raise EndedHere(line.format(error=error)) from error
    if re.search(NO_GPU, str(error)) and not any(Path("/dev").glob("nvidia*")):  # a driver may be lost for a moment
        where = f"loss() or the model uses a GPU{place_of(error.__traceback__)}, and there is none"
        raise EndedHere(f"{where}: leave that to Evenkeel, which moves the model and its batches") from None
    if "Expected to have finished reduction in the prior iteration" in str(error):
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        told = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        places = map(int, told[1].split() if told else ())
        raise _unused([names[place] for place in places if place < len(names)], len(names)) from error


def _unused(missing: Sequence[str], of: int) -> EndedHere:
    return EndedHere(
        f"{len(missing) or 'some'} of the model's {of} parameters got no gradient{': ' if missing else ''}"
        f"{listed(missing)}; use them in the loss, freeze them by requires_grad_(False), or set unused_parameters = "
        "True in the task's class if only some steps do not use them"
    )


def check_best(best: Any, patience: int) -> None:
    """Refuse a task's `best` that is neither None nor a metric with "max" or "min", and None with --patience."""
    shown = 'for example best = ("loss", "min")'
    if best is None and patience:
        raise Refusal(
            f"--patience {patience}: the task's `best` is None; name the metric that counts, {shown}, or leave "
            "--patience out"
        )
    pair = tuple(best) if isinstance(best, (tuple, list)) else ()
    if best is not None and (len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in ("max", "min")):
        raise Refusal(
            f'the task\'s `best` is {best!r}: it must be a metric\'s name and "max" or "min", {shown}, or None to keep '
            "no best checkpoint"
        )


def checked_embeddings(returned: Any, samples: int) -> dict[str, Tensor]:
    """The result of `embed()`, by name, if all have a row per sample; a single tensor has the name ""."""
    named = {"": returned} if isinstance(returned, Tensor) else _by_name(returned, "embed() returned", "tensors")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (samples,) or value.is_complex() or value.is_sparse:
            raise EndedHere(
                f"embed() returned {_shape_of(value)}{f' as {name!r}' if name else ''} for a batch of {samples} samples"
                f": it must be a tensor of real numbers with a row for each sample, [{samples}, ...]"
            )
    return dict(named)


def check_metrics(metrics: Any, samples: int, known: Mapping[str, Sequence[Tensor]]) -> None:
    """Check that the result of `metrics()` has a row per sample, and the same names and shapes for all batches.

    Args:
        metrics: for one batch.
        samples: in the batch.
        known: sums over the samples of earlier batches, by name; empty for the first one.
    """
    for name, values in _by_name(metrics, "metrics() returned", "tensors").items():
        if not isinstance(values, Tensor) or values.shape[:1] != (samples,):
            how = "leave out .item() or float()" if isinstance(values, Real) else "such as outputs.argmax(1) == labels"
            raise EndedHere(
                f"metrics() returned {_shape_of(values)} as '{name}' for a batch of {samples} samples: it must be a "
                f"tensor with a row for each sample, [{samples}, ...], or a scalar one, their mean; {how}"
            )
        if values.is_complex():
            raise EndedHere(f"metrics() returned complex numbers as '{name}': return real ones, by .abs() or .real")
    if known:
        shapes = {name: sums[0].shape for name, sums in known.items()}
        check_alike(shapes, {name: values.shape[1:] for name, values in metrics.items()})


def check_alike(known: Mapping[str, torch.Size], others: Mapping[str, torch.Size]) -> None:
    """Check that two batches have the same metrics, by name, with rows of the same shape."""
    if other := ", ".join(sorted(others.keys() ^ known.keys())):
        raise EndedHere(
            f"metrics() returned other names for one batch than for another ({other}): it must return the same"
        )
    for name, shape in known.items():
        if others[name] != shape:
            raise EndedHere(
                f"metrics() returned rows of shape {list(shape)} as '{name}' for one batch and of {list(others[name])} "
                "for another: give all samples rows of one shape, padded or summed"
            )


def checked_summary(summary: Any) -> dict[str, float]:
    """The result of `summarize()`, as plain numbers, which JSON and checkpoints can store."""
    numbers: dict[str, float] = {}
    for name, value in _by_name(summary, "summarize() returned", "numbers", Ended).items():
        number = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value
        if not isinstance(number, Real):
            raise Ended(f"summarize() returned {_shape_of(number)} as '{name}': it must be one real number")
        numbers[name] = number if type(number) is int else float(number)  # type: ignore[comparison-overlap,unreachable]
    return numbers


def one_number(name: str, mean: Tensor) -> float:
    """The mean of a metric that has one number for each sample."""
    if mean.numel() == 1:
        return float(mean)
    raise EndedHere(
        f"metrics() returned '{name}' with {mean.numel()} numbers, {list(mean.shape)}, for each sample: return one per "
        "sample (was [N, 1] broadcast against [N]?), or override summarize(means) to turn their means into numbers"
    )


def _by_name(returned: Any, which: str, what: str, kind: type[Ended] = EndedHere) -> Mapping[str, Any]:
    if not isinstance(returned, Mapping):
        raise kind(f"{which} {kind_of(returned)}: it must return a dict of {what}")
    for name in returned:
        if not isinstance(name, str):
            raise kind(f"{which} a dict with the key {name!r}: names of metrics must be strings")
    return returned


def _shape_of(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else kind_of(value)

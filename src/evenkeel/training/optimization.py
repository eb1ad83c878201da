"""Optimizers, and the learning rate: a pure function of the step, so it has no state to save. A task's own schedulers
are in `schedulers`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import cos, inf, pi
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..common.errors import Ended, Refusal
from ..config import Config
from ..distributed.reduction import is_dense

log = logging.getLogger(__name__)


def build_optimizers(model: nn.Module, config: Config) -> list[Optimizer]:
    """The optimizer of --optimizer over all parameters that learn; with muon two.

    Muon (Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024) steps all matrices except embeddings,
    AdamW the rest. Its update is scaled to AdamW's size (Liu et al., arXiv 2502.16982), so that one --lr and
    one --weight-decay work for both.

    Raises:
        Refusal: the options do not fit the optimizer, the model or torch.
    """
    if config.optimizer != "muon":
        return [build_optimizer(model.parameters(), config)]
    if not hasattr(torch.optim, "Muon"):
        raise Refusal(f"--optimizer muon: torch {torch.__version__} has none; install 2.9 or later, or use adamw")
    embeddings = {id(it.weight) for it in model.modules() if isinstance(it, (nn.Embedding, nn.EmbeddingBag))}
    learning = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in learning if p.dim() == 2 and id(p) not in embeddings]
    if not matrices:
        raise Refusal("--optimizer muon: the model has no matrix to train except embeddings; use adamw")
    momentum = 0.95 if config.momentum is None else config.momentum
    options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": momentum}
    muon = torch.optim.Muon(matrices, config.lr, config.weight_decay, **options)
    of_muon = set(map(id, matrices))
    rest = [p for p in learning if id(p) not in of_muon]
    return [muon, *([build_optimizer(rest, replace(config, optimizer="adamw", momentum=None))] if rest else [])]


def build_optimizer(parameters: Iterable[nn.Parameter], config: Config) -> Optimizer:
    """The optimizer of --optimizer, --lr and --weight-decay over all parameters that learn.

    Parameters of fewer than two dimensions (norms, biases) are not decayed without --decay-norms: pulling a norm's
    scale towards 0 does not regularise. They are the second parameter group.

    Raises:
        Refusal: as :func:`build_optimizers`; also for muon, which needs that function.
    """
    name, momentum, (first, second) = config.optimizer, config.momentum, config.betas
    if name == "muon":
        raise Refusal("--optimizer muon: needs a task without its own optimizers(); use adamw")
    if momentum is not None and name != "sgd":
        raise Refusal(f"--momentum {momentum:g}: {name} has none; set --betas, use sgd or muon, or leave it out")
    if name == "sgd" and (first, second) != Config().betas:
        raise Refusal(f"--betas {first:g} {second:g}: sgd has none; set --momentum, or use adam, adamw or muon")
    learning = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": learning}]
    if config.weight_decay and not config.decay_norms:
        matrices, others = ([p for p in learning if (p.dim() >= 2) is many] for many in (True, False))
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    # fused ones have all their state on the device (state on the host would be ahead of a GPU that hangs), and can skip
    # a step without the host; on a CPU they take a parameter's memory for one without gaps
    kinds = (p.device.type in ("cpu", "cuda") and p.is_floating_point() and is_dense(p) for p in learning)
    fused = all(kinds) or None
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": fused}
    if name == "sgd":
        momentum = 0.9 if momentum is None else momentum
        return SGD(groups, momentum=momentum, nesterov=momentum > 0, **options)
    return (Adam if name == "adam" else AdamW)(groups, betas=(first, second), **options)


def rate(config: Config, step: int, total_steps: int) -> float:
    """The factor on the peak learning rate at a step, 0 .. total_steps-1: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return float(0.1 ** int(3 * progress))
    if config.schedule == "poly":
        return float((1 - progress) ** 0.9)
    return 1 - progress if config.schedule == "linear" else (1 + cos(pi * progress)) / 2


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradient down to a 2-norm of at most ``max_norm`` (0: do not scale it).

    Args:
        parameters: all of the model's.
        max_norm: the maximum norm, or 0.

    Returns:
        The norm before scaling, a scalar on the device, the same on every rank.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm([weight], max_norm=1.0).item()
    5.0
    """
    parameters = list(parameters)
    if are_divided(parameters):
        from .row_norm import clip_rows

        return clip_rows([p.grad for p in parameters if p.grad is not None], max_norm)  # type: ignore[misc]
    norm = get_total_norm([_aligned(p.grad) for p in parameters if p.grad is not None])
    if max_norm:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def are_divided(parameters: Iterable[Tensor]) -> bool:
    """Whether parameters are DTensors (--shard), whose class takes a second to import."""
    return hasattr(next(iter(parameters), None), "to_local")


def _aligned(gradient: Tensor) -> Tensor:
    """The gradient; on a GPU a copy if its address is not a multiple of 16 bytes, as can happen in DDP's buckets: a GPU
    adds the squares of such a gradient in another order."""
    return gradient.clone() if gradient.is_cuda and gradient.data_ptr() % 16 else gradient


def rate_names(optimizers: Sequence[Optimizer], model: nn.Module) -> list[str]:
    """The name of each optimizer's learning rate: "lr" for the first; "lr_NETWORK" for the only optimizer of one part
    of the model, if it has no other parameters; else "lr_NUMBER", counted from 0.

    >>> networks = nn.ModuleDict({"generator": nn.Linear(2, 1), "critic": nn.Linear(2, 1)})
    >>> rate_names([SGD(network.parameters()) for network in networks.values()], networks)
    ['lr', 'lr_critic']
    """
    parts = {id(p): name.partition(".")[0] for name, p in model.named_parameters()}
    owners = [{parts.get(id(p), "") for group in it.param_groups for p in group["params"]} for it in optimizers]
    names = ["lr"]
    for number, own in list(enumerate(owners))[1:]:
        name = "".join(own)
        alone = len(own) == 1 and owners.count(own) == 1 and not name.isdecimal()
        names.append(f"lr_{name if alone else number}")
    return names[: len(owners)]


class Rates:
    """Sets the learning rates in each step. Warns once if something else sets them too, which has no effect.

    In a run that has ``begun``, the parameter groups already have the peak rates.
    """

    def __init__(self, optimizers: Sequence[Optimizer], begun: bool = False) -> None:
        self.optimizers = optimizers
        self._ours: dict[int, tuple[object, object]] = {}  # id of a group -> the group, whose id stays its own, and lr
        self._warned = False
        if not begun and any("initial_lr" in group for optimizer in optimizers for group in optimizer.param_groups):
            self._warn()  # torch's schedulers put it there

    def set(self, factors: float | Sequence[float]) -> None:
        """Set each parameter group's learning rate to its peak times one factor, or times its optimizer's own."""
        # for arrays too, because a checkpoint must not contain NumPy's numbers
        found: Any = factors.tolist() if hasattr(factors, "tolist") else factors
        each = found if isinstance(found, (list, tuple)) else [found] * len(self.optimizers)
        numbers = all(isinstance(factor, Real) and 0 <= float(factor) < inf for factor in each)
        if not numbers or len(each) != len(self.optimizers):
            raise Ended(
                f"rates() returned {factors!r}: it must return one factor on the peak learning rates, at least 0 and "
                f"finite, or a list with one for each of the {len(self.optimizers)} optimizers"
            )
        for optimizer, factor in zip(self.optimizers, each, strict=True):
            for group in optimizer.param_groups:
                lr = group["lr"]
                if self._ours.get(id(group), (group, lr))[1] is not lr:
                    self._warn()
                # the peak is kept where torch's schedulers keep it, so it is saved with the state
                group["lr"] = group.setdefault("initial_lr", lr) * float(factor)
                self._ours[id(group)] = group, group["lr"]

    def _warn(self) -> None:
        if not self._warned:
            log.warning(
                "something other than rates() sets a learning rate, perhaps a scheduler: it has no effect, because "
                "rates() sets all of them in each step; return it from schedulers() in the task, or override rates()"
            )
        self._warned = True


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
    """Load an optimizer's state, except for the choice of its implementation, which depends on the device.

    Runs of older versions have all ``parameters``, in the model's order, in one group and decay all of them; they
    continue to do so.
    """
    groups = optimizer.param_groups
    sizes, ours = ([len(group["params"]) for group in them] for them in (saved["param_groups"], groups))
    if sizes == [sum(ours)] != ours:
        theirs = {id(p) for group in groups for p in group["params"]}
        groups[0]["params"] = [p for p in parameters if id(p) in theirs]
        del groups[1:]
    elif sizes != ours:
        raise Ended(
            f"the checkpoint's optimizer has groups of {sizes} parameters and this one has {ours}: the code of the "
            "task or of the optimizer has changed; restore it, or start over with --fresh"
        )
    ways = ({way: group[way] for way in ("foreach", "fused", "capturable") if way in group} for group in groups)
    merged = [group | way for group, way in zip(saved["param_groups"], ways, strict=True)]
    optimizer.load_state_dict({**saved, "param_groups": merged})
    _restore_dtypes(optimizer, saved)
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items() if isinstance(kept, dict) else ():  # or a value of the optimizer as a whole
            # fused optimizers go through memory in its order; with channels last the saved order may differ
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                kept[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _restore_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load those values again that torch has converted to their parameter's dtype, such as float32 moments of bfloat16
    weights; but "step", of which it knows the dtype."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(number, {}).items():
            converted = type(value) is type(loaded[name]) is Tensor and value.dtype != loaded[name].dtype
            if name != "step" and converted:
                loaded[name] = value.to(loaded[name].device, copy=True)

"""--shard: parameters, gradients, moments and averages divided among the ranks by rows, with FSDP2.

Each rank owns some rows (dimension 0) of each parameter, as `torch.chunk` would divide them among all ranks (--shard
on) or among S consecutive ones (--shard S); then there are W / S replicas, with the same bits. A block's parameters are
gathered for its forward and backward pass, and freed after each (`torch.distributed.fsdp.fully_shard`; Zhao et al.,
"PyTorch FSDP", 2023, arXiv 2304.11277; Rajbhandari et al., "ZeRO", 2020, arXiv 1910.02054). The committed state of a
rank has its rows only, as plain tensors, and says under "rows" which tensors those are.

Optimizers must compute each element by itself, in torch's `foreach` way: fused kernels compute the end of a tensor
otherwise than its middle, and where a tensor ends would depend on the number of ranks.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..common.errors import EndedHere, Refusal
from ..common.naming import kind_of
from ..common.phases import CHECKPOINT, activity
from ..distributed.collectives import divided_weight_error
from ..distributed.sharded_reduction import ShardedReduction, TreeReduceScatter, Weights
from ..distributed.world import World
from .cut import has_batchnorm
from .file_memory import on_disk
from .meta_device import materialise
from .staging import dotted, map_tensors
from .state_dicts import local_rows, undivided
from .task import Task, defines

ELEMENTWISE = (SGD, Adam, AdamW)
OPTION = "--shard"


def _refuse_rows(*_: Any) -> Any:
    """In place of what torch would do with each rank's rows of a DTensor as if they were all, without a word."""
    raise divided_weight_error(sys._getframe(1))


def _refuse_some_rows(method: Any) -> Any:
    """Torch indexes a copy with all rows, so what is written there would be lost, without a word."""

    @functools.wraps(method)
    def checked(weight: DTensor, index: Any, *value: Any) -> Any:
        first = index[0] if isinstance(index, tuple) and index else index
        number = hasattr(first, "__index__") and not getattr(first, "ndim", 0)
        if number or (isinstance(first, slice) and first != slice(None)):
            raise divided_weight_error(sys._getframe(1))
        return method(weight, index, *value)

    return checked


def _refuse_graph(pre_backward: Any) -> Any:
    """A pass that builds a graph would later read weights that FSDP2 has freed, which can end in a SIGSEGV."""

    @functools.wraps(pre_backward)
    def checked(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            raise EndedHere(f"{OPTION}: create_graph=True: gradients of gradients are not supported; leave one out")
        return pre_backward(*arguments)

    return checked


@functools.cache
def _refuse_silent_uses() -> None:
    """Make torch raise where it would be wrong without a word. These names are private, and may be gone."""
    if hasattr(FSDPState, "_pre_backward"):
        FSDPState._pre_backward = _refuse_graph(FSDPState._pre_backward)  # type: ignore[method-assign]
    for name in ("__getitem__", "__setitem__"):
        setattr(DTensor, name, _refuse_some_rows(getattr(DTensor, name)))
    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    for operation in (torch.ops.aten._local_scalar_dense.default, *getattr(dispatcher, "_random_ops", ())):
        handlers[operation] = _refuse_rows  # item(), normal_() and the like


def refuse_unshardable(task: Task, model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Refuse what FSDP2 cannot train, or not with the same bits on any number of ranks, before anything is written."""
    if task.unused_parameters:
        raise Refusal(f"{OPTION}: {kind_of(task)} says that parameters may get no gradient; leave it out")
    if has_batchnorm(model):
        raise Refusal(f"{OPTION}: the model has BatchNorm, which it does not support; use GroupNorm or LayerNorm")
    for method in ("batch_loss", "refresh"):
        if defines(type(task), method):
            raise Refusal(f"{OPTION}: {kind_of(task)} defines {method}(), which it does not support; leave one out")
    blocks = task.blocks(model)
    if not blocks:
        raise Refusal(
            f"{OPTION}: {kind_of(model)} has no repeated blocks in an nn.Sequential or nn.ModuleList; define "
            "blocks(model) in the task and return the modules whose parameters are gathered one after the other"
        )
    for module in (model, *blocks):
        if type(module).forward is nn.Module.forward:
            raise Refusal(f"{OPTION}: {kind_of(module)} has no forward(); write one, and call the module in loss()")
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise Refusal(f"{OPTION}: {name} is a number without rows; make it a tensor of one element")
        if not parameter.numel():
            raise Refusal(f"{OPTION}: {name} has no elements; leave it out")
        if not parameter.is_contiguous():
            raise Refusal(f"{OPTION}: {name} is not contiguous in memory; make it so with .contiguous()")
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Refusal(f"{OPTION}: {name} has a hook, which would not be called; remove it, or hook its module")
    _refuse_tied_or_mixed(model, blocks)
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE:
            what = f"{OPTION}: {kind_of(optimizer)} is not known to compute each element by itself"
            raise Refusal(f"{what}; use SGD, Adam or AdamW")
        if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            raise Refusal(f"{OPTION}: the learning rate of {kind_of(optimizer)} is a tensor; make it a number")


def _refuse_tied_or_mixed(model: nn.Module, blocks: list[nn.Module]) -> None:
    owners: dict[int, tuple[str, str]] = {}
    kinds: dict[str, tuple[str, torch.dtype]] = {}
    names = {id(module): name for name, module in model.named_modules()}
    places = [names[id(block)] for block in blocks if names.get(id(block))]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = next((place for place in places if name.startswith(f"{place}.")), "")
        other, there = owners.setdefault(id(parameter), (name, place))
        if there != place:
            raise Refusal(f"{OPTION}: {other} and {name} are one tensor, in different blocks; untie them")
        other, kind = kinds.setdefault(place, (name, parameter.dtype)) if parameter.requires_grad else ("", None)
        if kind and kind != parameter.dtype:
            raise Refusal(f"{OPTION}: {other} is {kind} and {name} {parameter.dtype}; use one type in each block")


class Sharding:
    """How the tensors of a run's state are divided among the ranks.

    Args:
        model: its parameters are replaced. Rank 0 has their values, on any device; elsewhere they may be on the meta
            device. One block at a time comes to the device of each rank.
        average: a copy of it, whose parameters, also on the meta device, are replaced by equal ones; None: none.
        optimizers: before their first step; they get the new parameters.
        task: names the blocks.
        world: the ranks; a process that is alone gets a process group here.
        precision: "bf16" computes with parameters in bfloat16, and adds gradients in float32.
        ranks: S, of a replica; 0: all.
    """

    def __init__(
        self,
        model: nn.Module,
        average: nn.Module | None,
        optimizers: list[Optimizer],
        task: Task,
        world: World,
        precision: str,
        ranks: int = 0,
    ) -> None:
        self.ranks, self._world = ranks or world.world_size, world
        self.rank = world.rank % self.ranks
        if not dist.is_initialized():  # torchrun has not started this process; a later run in it takes the same group
            dist.init_process_group(world.backend, store=HashStore(), rank=0, world_size=1)
            atexit.register(dist.destroy_process_group)
        self.reduction, self._model, self._optimizers = ShardedReduction(world), model, optimizers
        self._counted: tuple[list[Any], dict[str, int]] = [], {}
        replicas = world.world_size // self.ranks
        self._owners: dist.ProcessGroup | None = None
        if replicas == 1:
            self._mesh = init_device_mesh(world.device.type, (world.world_size,))
        else:
            both = init_device_mesh(world.device.type, (replicas, self.ranks), mesh_dim_names=("replica", "shard"))
            self._mesh, self._owners = both["shard"], both["replica"].get_group()
            limit = dist.group.WORLD._get_backend(world.device).options._timeout  # type: ignore[union-attr]
            for part in (self._mesh.get_group(), self._owners):  # else torch's default: before the watch for hangs
                dist.distributed_c10d._set_pg_timeout(limit, part)
        self._policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if precision == "bf16" else ()))
        names = {id(module): name for name, module in model.named_modules()}
        found = {names[id(block)] for block in task.blocks(model)} - {""}
        blocks = sorted(found, key=lambda name: (-name.count("."), name))  # the same order on all ranks
        before = list(model.parameters())
        self._send_buffers(average)
        for each in [model, *([average] if average else [])]:
            self._divide(each, blocks)
        if average:
            torch._foreach_copy_(local_rows(average.parameters()), local_rows(model.parameters()))
        self.reduction.parameters = list(model.parameters())
        mine = zip(local_rows(model.parameters()), before, strict=True)
        rows = [nn.Parameter(tensor, parameter.requires_grad) for tensor, parameter in mine]
        self.whole: dict[Tensor, Any] = dict(zip(rows, self.reduction.parameters, strict=True))
        """This rank's rows, as optimizers have them -> the parameter. To step DTensors is slow, above all at first."""
        instead = dict(zip(before, rows, strict=True))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [instead[parameter] for parameter in group["params"]]
                group |= {"fused": None, "foreach": True}
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # set by fused ones
            optimizer.register_step_pre_hook(self._take_gradients)
            optimizer.register_step_post_hook(self._leave_gradients)

    def _send_buffers(self, average: nn.Module | None) -> None:
        """Give all ranks what rank 0 has besides parameters: dense buffers, and what modules add to the state dict."""
        learned = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        more = {name: it for name, it in self._model.state_dict().items() if name not in learned | buffers.keys()}
        dense = {name: buffer for name, buffer in buffers.items() if buffer.layout is torch.strided}
        dense, more = self._world.broadcast_tensors((dense, more))
        for each in [self._model, *([average] if average else [])] if self._world.rank else []:
            own = dict(each.named_buffers(remove_duplicate=False))
            for name, value in dense.items():
                own[name].copy_(value)
            if more:
                each.load_state_dict(more, strict=False)

    @torch.no_grad()
    def _take_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        for rows in (it for group in optimizer.param_groups for it in group["params"]):
            if (whole := self.whole.get(rows)) is not None:
                rows.data = whole.to_local()  # torch 2.9 replaces them in the first pass
                rows.grad = None if whole.grad is None else whole.grad.to_local()

    @staticmethod
    def _leave_gradients(optimizer: Optimizer, *_: Any) -> None:
        optimizer.zero_grad()  # else they stay in memory during the next step

    def _send(self, parameter: nn.Parameter) -> None:
        """Bring rank 0's values of a parameter to the device of each rank."""
        if self._world.world_size > 1:
            materialise(parameter, self._world.device)
            parameter.data = parameter.data.to(self._world.device)
            dist.broadcast(parameter.data.flatten().view(torch.uint8), 0)

    def _divide(self, model: nn.Module, blocks: list[str]) -> None:
        """Divide the parameters of the blocks, and as one further block all others."""
        _refuse_silent_uses()
        for module in [*map(model.get_submodule, blocks), model]:
            whole = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
            for parameter in whole:
                if model is self._model:
                    self._send(parameter)
                materialise(parameter, self._world.device)  # of the average, which gets rows of the model
            # the rest is freed after forward too: an evaluation has no backward pass that would do so, and the
            # gathered weights would be those of an old step
            divided: Any = fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._policy)
            divided.set_gradient_divide_factor(1.0)  # the loss has the weights
            divided.set_force_sum_reduction_for_comms(True)
            communication = TreeReduceScatter(self.reduction, self._owners)
            divided.set_custom_all_gather(Weights(self.reduction))
            divided.set_custom_reduce_scatter(communication)
            divided.set_all_reduce_hook(communication.alone)
            for parameter in whole:  # FSDP2 has copied this rank's rows, but other objects still refer to all of them
                parameter.data = parameter.new_empty(0)
        for parameter in model.parameters():
            if parameter.requires_grad:  # FSDP2 sets .grad itself; what autograd brings there is of one rank
                parameter.register_hook(_refuse_rows)  # type: ignore[no-untyped-call]

    def writes(self) -> dict[str, int]:
        """How often passes have written to the gathered weights, by parameter. The rows know nothing of it."""
        names, found = {module: name for name, module in self._model.named_modules()}, {}
        for module in names:
            state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
            for it in getattr(getattr(state, "_fsdp_param_group", None), "fsdp_params", ()):
                gathered, place = getattr(it, "_unsharded_param", None), it._module_info
                name = f"{names[place.module]}.{place.param_name}".lstrip(".")
                found[name] = 0 if gathered is None else gathered._version
        return found

    def recover(self) -> None:
        """Free what a pass that failed has gathered, and forget its gradient: the next pass begins anew."""
        model: Any = self._model
        if model._get_fsdp_state()._is_root:  # known from the first pass on
            model.reset_iter_state()

    def described(self, state: dict[str, Any], whole: bool = False) -> dict[str, Any]:
        """A state that has this rank's rows of divided tensors, or all, and under "rows" how many there are of each.
        Of a ``whole`` state they are counted in it: the model may have others, which `State.restore` refuses."""
        entries = (entry for saved in state["optimizers"] for entry in saved["state"].items())
        there = [whole, *state, *([i, *(name for name, it in entry.items() if it is not None)] for i, entry in entries)]
        counted = self._counted
        if whole or counted[0] != there:  # again after the first step, in which optimizers make their tensors
            counted = self._counted = there, self._rows_of(state, whole)
        return {**state, "rows": {"rank": self.rank, "ranks": self.ranks, "of": counted[1]}}

    def _rows_of(self, state: dict[str, Any], whole: bool) -> dict[str, int]:
        of: dict[str, int] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            for part in ("model", "ema"):
                tensor = state.get(part, {}).get(name) if whole else parameter
                if part in state and tensor is not None and tensor.dim():
                    of[f"{part}.{name}"] = len(tensor)
        for number, (optimizer, saved) in enumerate(zip(self._optimizers, state["optimizers"], strict=False)):
            for i, rows in enumerate(it for group in optimizer.param_groups for it in group["params"]):
                shape = self.whole[rows].shape if whole else rows.shape
                for name, it in saved["state"].get(i, {}).items():
                    if isinstance(it, Tensor) and it.shape == shape:
                        of[f"optimizers.{number}.state.{i}.{name}"] = len(self.whole[rows])  # = shape[0] of a whole one
        return of

    def divided(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A described state with DTensors in place of this rank's rows."""
        of = state["rows"]["of"]

        def whole(rows: Tensor, path: tuple[object, ...]) -> Tensor:
            if dotted(path) not in of:
                return rows
            shape = torch.Size([of[dotted(path)], *rows.shape[1:]])
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(rows, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

        return {name: part for name, part in map_tensors(dict(state), whole).items() if name != "rows"}

    def gathered(self, weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
        """Whole tensors for a file that loads anywhere, on rank 0, in files without names in its folder; others get {}.
        One after the other is gathered, so no process has memory for more than the largest. All must call it."""
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            activity.enter(CHECKPOINT, name)  # again: each is progress
            whole = undivided(tensor)
            if self._world.rank == 0:
                found[name] = on_disk(whole.shape, whole.dtype, folder).copy_(whole)
        return found

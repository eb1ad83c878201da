"""A model on several devices of one process: whole networks (--place), or one cut into parts (--model-parallel).

Both assign a device to each tensor, and move inputs before some modules. Names in the state dict do not change, so
checkpoints do not depend on the placement.

`torch.fx` finds the possible cuts without running the network: a cut inside a residual block, for example, would add
tensors of two devices. This is not a pipeline: while one device computes, the others wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from ..common.errors import Refusal
from ..config import Config, devices_per_rank, placed_networks
from ..data.batch import to_device

NO_TENSOR = frozenset(
    {"shape", "device", "dtype", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda", "training"}
)
"""Attributes and methods of a tensor that do not return a tensor; their results are on no device."""


@dataclass
class Placement:
    """Where a model's tensors are and before which modules inputs are moved. Devices are numbered within the rank."""

    tensors: dict[str, int] = field(default_factory=dict)
    """Device by name of a parameter or buffer; 0 for the others."""
    arrivals: dict[str, int] = field(default_factory=dict)
    """Device by name of a module whose inputs are moved to it."""
    returns: list[str] = field(default_factory=list)
    """Modules whose outputs are moved to device 0."""
    line: str = ""
    """For the log."""

    def connect(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        """Register hooks that move inputs to the devices of a module's tensors."""
        follow = _Follow(devices[0])
        for name, number in self.arrivals.items():
            model.get_submodule(name).register_forward_pre_hook(follow.inputs_to(devices[number]), with_kwargs=True)
        for name in self.returns:
            model.get_submodule(name).register_forward_hook(lambda _module, _args, out: follow(out, devices[0]))


class _Follow:
    """Moves values to a device, which continues with the random numbers of the previous device.

    So dropout in a cut network draws what it would draw on one device. CPUs have one generator anyway.
    """

    def __init__(self, home: torch.device) -> None:
        self._at = home

    def __call__(self, value: Any, device: torch.device) -> Any:
        if device.type == "cuda" and device != self._at:
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(self._at), device)  # on the host; no wait
            self._at = device
        return to_device(value, device)

    def inputs_to(self, device: torch.device) -> Any:
        """Return a hook that moves a module's inputs to the device."""
        return lambda _module, args, kwargs: self((args, kwargs), device)


def place(model: nn.Module, config: Config, devices: Sequence[torch.device]) -> str:
    """Put a model on the devices of this rank, by --place or --model-parallel; without these on the first one;
    with --shard on only its buffers.

    Returns:
        A line about the placement; empty without these options.

    Raises:
        Refusal: the model cannot be placed like this.
    """
    if config.channels_last:
        channels_last(model)
    # parameters come to the device when they are divided, one block at a time; an evaluation alone divides none
    if config.shard != "off" and not config.eval_only:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(devices[0]))
        return ""
    if devices_per_rank(config) == 1 and not config.place:
        model.to(devices[0])
        return ""
    placement = named(model, placed_networks(config)) if config.place else cut(model, config.model_parallel)
    sizes = [0] * len(devices)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            number = placement.tensors.get(name, 0)
            tensor.data = tensor.data.to(devices[number])
            sizes[number] += tensor.nbytes
    placement.connect(model, devices)
    on_cpu = devices[0].type == "cpu"
    names = [f"part {i}" if on_cpu else str(device) for i, device in enumerate(devices)]
    shown = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in zip(names, sizes, strict=True))
    return f"{placement.line}: {shown}" + ("; there is no GPU, so everything is on the CPU" if on_cpu else "")


def channels_last(model: nn.Module) -> None:
    """Use the channels-last memory format for the model's tensors of four dimensions and its networks' inputs."""
    model.to(memory_format=torch.channels_last)
    for network in model.children() if isinstance(model, nn.ModuleDict) else [model]:
        network.register_forward_pre_hook(_with_channels_last, with_kwargs=True)


def _with_channels_last(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    def change(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    return tree_map_only(Tensor, change, (args, kwargs))


def named(model: nn.Module, networks: Mapping[str, int]) -> Placement:
    """Place each network on its device. Outputs come back to the first device, where the task's loss combines them.

    Raises:
        Refusal: the model has no network of such a name.
    """
    children = dict(model.named_children())
    typed = "--place " + ",".join(f"{name}={number}" for name, number in networks.items())
    for name in networks:
        if name not in children:
            there = ", ".join(children) or "none at all"
            raise Refusal(f"{typed}: the model has no network '{name}'; it has {there}")
    if 0 not in networks.values() and networks.keys() == children.keys():
        raise Refusal(f"{typed}: device 0 has no network; number the devices of a process from 0")
    found = Placement(arrivals={name: networks.get(name, 0) for name in children}, line=typed)
    for name, network in children.items():
        for tensor, _ in [*network.named_parameters(name), *network.named_buffers(name)]:
            found.tensors[tensor] = networks.get(name, 0)
    found.returns = list(children) if isinstance(model, nn.ModuleDict) else [""]  # an nn.ModuleDict is never called
    return _without_ties(model, found, typed)


def cut(model: nn.Module, parts: int) -> Placement:
    """Cut a network into consecutive parts, the largest as small as possible; of an `nn.ModuleDict`, each network.

    Raises:
        Refusal: there are too few places at which it may be cut.
    """
    networks = dict(model.named_children()) if isinstance(model, nn.ModuleDict) else {}
    typed, found, lines = f"--model-parallel {parts}", Placement(), []
    for name, network in (networks or {"": model}).items():
        prefix, shown = f"{name}." if name else "", name or type(network).__name__
        flow = _Flow(network, f"{typed}: {shown}")
        starts = flow.cuts(parts)
        part_of = [sum(place >= start for start in starts) for place in range(len(flow.units))]
        found.arrivals[name] = 0
        found.returns.append(name)
        for (module, place), sources in flow.entries.items():
            if any(part_of[source] != part_of[place] for source in sources):
                found.arrivals[prefix + module] = part_of[place]
        found.tensors |= {prefix + tensor: part_of[place] for tensor, place in flow.tensors.items()}
        units = list(flow.units)
        lines.append(f"{shown} is cut before {' and '.join(prefix + units[start] for start in starts)}")
    found.line = f"{typed}: {'; '.join(lines)}"
    return _without_ties(model, found, typed)


def _without_ties(model: nn.Module, found: Placement, typed: str) -> Placement:
    """Refuse a tensor that would be on two devices."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if found.tensors.get(other, 0) != found.tensors.get(name, 0):
            raise Refusal(f"{typed}: {other} and {name} are the same tensor and must be on one device; untie them")
    return found


class _Flow:
    """The order in which a network's modules run, and the places where it may be cut.

    A *place* is the number of a unit (an innermost module with tensors) in order of execution. A value has the place of
    the unit on whose device it is; a module's inputs have that of its first unit. An operation outside the units that
    takes values from two places needs them on one device, so there is no cut between these.

    Args:
        network: is traced, not run.
        typed: the beginning of a refusal.
    """

    def __init__(self, network: nn.Module, typed: str) -> None:
        self.network, self.typed = network, typed
        self.units: dict[str, int] = {}
        self.entries: dict[tuple[str, int], set[int]] = {}
        """(a module, its place) -> the places from which its inputs come."""
        self.tensors: dict[str, int] = {}
        """The place of each parameter and buffer."""
        self._together: list[set[int]] = []
        """Places that must be on one device."""
        self._loose: dict[str, set[int]] = {}
        """Parameters used outside the units, with the places of the values that they are combined with."""
        self._follow(self._trace())
        self._weights = self._weigh()

    def cuts(self, parts: int) -> list[int]:
        """Return the first places of all parts but the first."""
        closed = {place for group in self._together for place in range(min(group) + 1, max(group) + 1)}
        allowed = [place for place in range(1, len(self.units)) if place not in closed]
        if len(allowed) < parts - 1:
            raise Refusal(
                f"{self.typed} can be cut at {len(allowed)} of the {max(0, len(self.units) - 1)} places between its "
                "modules with weights (elsewhere an operation combines values of both sides, as in a residual block); "
                + (f"use --model-parallel {len(allowed) + 1} or less" if allowed else "leave --model-parallel out")
            )
        return balanced(self._weights, allowed, parts)

    def _trace(self) -> fx.Graph:
        reason = ""
        for coarse in (False, True):
            try:
                return _Tracer(coarse).trace(self.network)
            except Exception as error:  # whatever a network does with a value that has no number
                reason = reason or f"{type(error).__name__}: {error}".split("\n")[0]
        raise Refusal(
            f"{self.typed} cannot be cut, because torch.fx cannot trace it ({reason}); write it as an "
            "nn.Sequential, or put whole networks on devices with --place"
        )

    def _follow(self, graph: fx.Graph) -> None:
        """Give each value of a traced network its places, and each unit its own."""
        places: dict[fx.Node, set[int]] = {}
        loose: dict[fx.Node, set[str]] = {}
        modules: dict[str, int] = {}
        for node in graph.nodes:
            here = {place for value in node.all_input_nodes for place in places[value]}
            attributes = {name for value in node.all_input_nodes for name in loose[value]}
            target = str(node.target)
            if node.op == "placeholder":
                here = {0}
            elif node.op == "get_attr":
                attributes = {target}
            elif node.op == "call_module" and _has_tensors(self.network.get_submodule(target)):
                place = self.units.setdefault(target, len(self.units))
                self.entries.setdefault((target, place), set()).update(here)
                here, attributes = self._meet(attributes, {place}), set()
            elif node.target is _enter:
                module = str(node.args[1])
                place = modules.setdefault(module, len(self.units))
                if here:
                    self.entries.setdefault((module, place), set()).update(here)
                    here = {place}
            elif _gives_no_tensor(node):
                here, attributes = set(), set()
            elif node.op != "output" and here:
                self._together.append(here)
                here, attributes = {max(self._meet(attributes, here))}, set()
            places[node], loose[node] = here, attributes

    def _meet(self, attributes: set[str], here: set[int]) -> set[int]:
        for name in attributes:
            self._loose.setdefault(name, set()).update(here)
        return here

    def _weigh(self) -> list[int]:
        """Find the place of each tensor, and return the bytes at each place."""
        tensors: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        tensors |= dict(self.network.named_buffers(remove_duplicate=False))
        owners: dict[int, set[int]] = {}
        for name, tensor in tensors.items():
            unit = next((place for unit, place in self.units.items() if name.startswith(f"{unit}.")), None)
            met = self._loose.get(name, {0}) if unit is None else {unit}
            self.tensors[name] = min(met)
            owners.setdefault(id(tensor), set()).update(met)
        self._together += owners.values()  # tied tensors, or used at several places
        weights = [0] * len(self.units)
        for name, tensor in tensors.items():
            if weights and owners.pop(id(tensor), set()):  # once for a tied tensor
                weights[self.tensors[name]] += tensor.nbytes
        return weights


def _enter(value: Any, module: str) -> Any:
    """In a traced network: a value inside a module, which may have moved it to its device."""
    return value


class _Tracer(fx.Tracer):
    """Traces down to torch's own and innermost modules, and notes where values enter the others.

    A coarse one traces only the network itself and sequences in it, because some parts cannot be traced.
    """

    def __init__(self, coarse: bool) -> None:
        super().__init__()
        self._coarse = coarse

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is taken as a whole."""
        if self._coarse:
            return type(m).forward is not nn.Sequential.forward
        return super().is_leaf_module(m, module_qualified_name) or not any(True for _ in m.children())

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call of a module."""
        name = self.path_of_module(m)
        if not self.is_leaf_module(m, name) and _has_tensors(m):
            enter = partial(self._enter, name)
            args, kwargs = tree_map_only(fx.Proxy, enter, args), tree_map_only(fx.Proxy, enter, kwargs)
        return super().call_module(m, forward, args, kwargs)

    def _enter(self, module: str, value: fx.Proxy) -> fx.Proxy:
        return self.create_proxy("call_function", _enter, (value, module), {})


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _gives_no_tensor(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in NO_TENSOR
    return node.op == "call_function" and node.target is getattr and node.args[1] in NO_TENSOR


def balanced(weights: Sequence[int], allowed: Sequence[int], parts: int) -> list[int]:
    """Cut a row of weights before some of the allowed places so that the heaviest part is as light as possible.

    Returns:
        The first places of all parts but the first.

    >>> balanced([1, 1, 1, 3], allowed=[1, 2, 3], parts=2)
    [3]
    """
    sums = [0, *accumulate(weights)]

    @cache
    def best(parts: int, end: int) -> tuple[float, list[int]]:
        """(the heaviest, the cuts) of the weights up to a place."""
        if parts == 1:
            return sums[end], []
        heads = ((start, *best(parts - 1, start)) for start in allowed if start < end)
        options = ((max(heaviest, sums[end] - sums[start]), [*cuts, start]) for start, heaviest, cuts in heads)
        return min(options, default=(inf, []))

    return best(parts, len(weights))[1]

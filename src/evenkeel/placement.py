"""Several devices for one process: networks on devices of their own, or one network cut into consecutive parts.

Both come down to the same two things: which device each tensor of the model is on, and before which modules the inputs
are moved. Names in the state dict stay as they are, so a checkpoint does not know how the model was placed.

Where a network may be cut follows from how its data flows, which `torch.fx` finds out without running it. A cut inside
a residual block, for example, would add a tensor on one device to one on another. It is no pipeline: while one device
computes, the other waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from .config import Config, devices_per_rank, placed_networks
from .data import to_device
from .errors import Ended, Refusal

NO_TENSOR = frozenset(
    {"shape", "device", "dtype", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda", "training"}
)
"""Attributes and methods of a tensor that give none; what is computed from them is on no device."""


@dataclass
class Placement:
    """Where a model's tensors are and before which modules inputs are moved. Devices are numbered within the rank."""

    tensors: dict[str, int] = field(default_factory=dict)
    """Number of the device by name of a parameter or buffer; 0 for those that are not named."""
    arrivals: dict[str, int] = field(default_factory=dict)
    """Modules whose inputs are moved, by name, and to which device."""
    returns: list[str] = field(default_factory=list)
    """Modules whose outputs are moved to device 0."""
    line: str = ""
    """What is told of it."""

    def apply(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        """Move the model's tensors, in place, and arrange that data follows."""
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.data = tensor.data.to(devices[self.tensors.get(name, 0)])
                if tensor.grad is not None:
                    tensor.grad = None  # of another device
        self.connect(model, devices)

    def connect(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        """Let inputs of modules follow to the devices of their tensors."""
        generators = _Generators(devices[0])
        for name, number in self.arrivals.items():
            model.get_submodule(name).register_forward_pre_hook(_Arrival(devices[number], generators), with_kwargs=True)
        for name in self.returns:
            model.get_submodule(name).register_forward_hook(_Return(devices[0], generators))


def place(model: nn.Module, config: Config, devices: Sequence[torch.device]) -> str:
    """Put a model on the devices of this rank, as --place or --model-parallel say; on the first one if neither does.

    Args:
        model: on the CPU.
        config: its place and model_parallel.
        devices: as many as these need. They may all be the CPU.

    Returns:
        A line that says what is where; empty if all is on the first device because nobody asked for more.

    Raises:
        Refusal: it cannot be placed so.
    """
    if config.channels_last:
        channels_last(model)
    if devices_per_rank(config) == 1 and not config.place:
        model.to(devices[0])
        return ""
    placement = named(model, placed_networks(config)) if config.place else cut(model, config.model_parallel)
    placement.apply(model, devices)
    sizes = [0] * len(devices)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sizes[placement.tensors.get(name, 0)] += tensor.nbytes
    on_cpu = devices[0].type == "cpu"
    shown = ", ".join(
        f"{f'part {i}' if on_cpu else device} {size / 1e6:.1f} MB"
        for i, (device, size) in enumerate(zip(devices, sizes, strict=True))
    )
    return f"{placement.line}: {shown}" + ("; there is no GPU, so all is on the CPU" if on_cpu else "")


def channels_last(model: nn.Module) -> None:
    """Keep channels last in memory, in the model's tensors of four dimensions and in those that its networks get."""
    model.to(memory_format=torch.channels_last)
    for network in model.children() if isinstance(model, nn.ModuleDict) else [model]:
        network.register_forward_pre_hook(_with_channels_last, with_kwargs=True)


def _with_channels_last(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    def change(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    return tree_map_only(Tensor, change, (args, kwargs))


def named(model: nn.Module, networks: Mapping[str, int]) -> Placement:
    """Each network on the device that it was given. Its outputs come back to the first device, so that the task's loss
    finds all it combines in one place.

    Raises:
        Refusal: the model has no network of such a name.
    """
    children = dict(model.named_children())
    typed = ",".join(f"{name}={number}" for name, number in networks.items())
    for name in networks:
        if name not in children:
            raise Refusal(
                f"--place {typed}: the model has no network '{name}'; it has " + (", ".join(children) or "none at all")
            )
    if 0 not in networks.values() and networks.keys() == children.keys():
        raise Refusal(f"--place {typed}: device 0 has no network; number the devices of a process from 0")
    found = Placement(line=f"--place {typed}")
    for name, network in children.items():
        found.arrivals[name] = networks.get(name, 0)
        for tensor, _ in [*network.named_parameters(name), *network.named_buffers(name)]:
            found.tensors[tensor] = networks.get(name, 0)
    # an nn.ModuleDict is never called itself
    found.returns = list(children) if isinstance(model, nn.ModuleDict) else [""]
    _refuse_ties(model, found, f"--place {typed}")
    return found


def cut(model: nn.Module, parts: int) -> Placement:
    """A network in so many consecutive parts, the largest of which is as small as can be. Of an `nn.ModuleDict` each
    network is cut.

    Raises:
        Refusal: there are not as many places at which it may be cut.
    """
    networks = dict(model.named_children()) if isinstance(model, nn.ModuleDict) else {}
    found = Placement()
    lines = []
    for name, network in (networks or {"": model}).items():
        prefix = f"{name}." if name else ""
        flow = _Flow(network, f"--model-parallel {parts}: {name or type(network).__name__}")
        starts = flow.cuts(parts)
        found.arrivals[name] = 0
        found.returns.append(name)
        part_of = [sum(place >= start for start in starts) for place in range(len(flow.units))]
        for (module, place), sources in flow.entries.items():
            if any(part_of[source] != part_of[place] for source in sources):
                found.arrivals[prefix + module] = part_of[place]
        found.tensors |= {prefix + tensor: part_of[place] for tensor, place in flow.tensors.items()}
        before = [next(unit for unit, place in flow.units.items() if place == start) for start in starts]
        lines.append(f"{name or type(network).__name__} is cut before {' and '.join(prefix + unit for unit in before)}")
    found.line = f"--model-parallel {parts}: {'; '.join(lines)}"
    _refuse_ties(model, found, f"--model-parallel {parts}")
    return found


def _refuse_ties(model: nn.Module, found: Placement, typed: str) -> None:
    """One tensor cannot be on two devices."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if found.tensors.get(other, 0) != found.tensors.get(name, 0):
            raise Refusal(f"{typed}: {other} and {name} are one tensor and must be on one device; untie them")


class _Flow:
    """In which order a network's modules run, and between which of them it may be cut.

    A *place* is the number of a unit (an innermost module with tensors of its own) in order of execution. Every value
    has the place of the unit whose device it is on, and what enters a module that of the first unit in it. An operation
    outside the units that takes values from two places needs them on one device, so there is no cut between these two.

    Args:
        network: is traced, not run.
        typed: begins the message of a refusal.
    """

    def __init__(self, network: nn.Module, typed: str) -> None:
        self.network, self.typed = network, typed
        self.units: dict[str, int] = {}
        self.entries: dict[tuple[str, int], set[int]] = {}
        """(a module, its place) -> the places from which its inputs come."""
        self.tensors: dict[str, int] = {}
        """The place of each tensor."""
        self._together: list[set[int]] = []
        self._loose: dict[str, set[int]] = {}
        graph = self._trace()
        self._follow(graph)
        self._weigh()

    def cuts(self, parts: int) -> list[int]:
        """The places at which the second part and those after it start.

        Raises:
            Refusal: there are too few.
        """
        closed = {place for group in self._together for place in range(min(group) + 1, max(group) + 1)}
        allowed = [place for place in range(1, len(self.units)) if place not in closed]
        if len(allowed) < parts - 1:
            raise Refusal(
                f"{self.typed} can be cut at {len(allowed)} of the {max(0, len(self.units) - 1)} places between its "
                "modules with weights (at the others an operation combines what is before and behind, as in a residual "
                "block); "
                + (f"use --model-parallel {len(allowed) + 1} or less" if allowed else "leave --model-parallel out")
            )
        return balanced(self._weights, allowed, parts)

    def _trace(self) -> fx.Graph:
        reason = ""
        for tracer in (_Tracer(), _Coarse()):
            try:
                return tracer.trace(self.network)
            except Exception as error:  # whatever a network does with a value that has no number
                reason = reason or f"{type(error).__name__}: {error}".split("\n")[0]
        raise Refusal(
            f"{self.typed} cannot be cut, because torch.fx does not see how its data flows ({reason}); write it as an "
            "nn.Sequential, or put whole networks on devices with --place"
        )

    def _follow(self, graph: fx.Graph) -> None:
        """Give each value of a traced network its places, and each unit its own."""
        places: dict[fx.Node, set[int]] = {}
        loose: dict[fx.Node, set[str]] = {}
        modules: dict[str, int] = {}
        for node in graph.nodes:
            inputs = node.all_input_nodes
            here = {place for value in inputs for place in places[value]}
            attributes = {name for value in inputs for name in loose[value]}
            target = str(node.target)
            if node.op == "placeholder":
                here = {0}
            elif node.op == "get_attr":
                attributes = {target}
            elif node.op == "call_module" and _has_tensors(self.network.get_submodule(target)):
                place = self.units.setdefault(target, len(self.units))
                self.entries.setdefault((target, place), set()).update(here)
                self._join(attributes, {place})
                here, attributes = {place}, set()
            elif node.target is _enter:
                module = str(node.args[1])
                place = modules.setdefault(module, len(self.units))
                if here:
                    self.entries.setdefault((module, place), set()).update(here)
                    here = {place}
            elif _gives_no_tensor(node):
                here, attributes = set(), set()
            elif node.op != "output" and here:
                self._join(attributes, here)
                self._together.append(here)
                here, attributes = {max(here)}, set()
            places[node], loose[node] = here, attributes

    def _join(self, attributes: set[str], here: set[int]) -> None:
        """A parameter that is used outside the units is on the device of what it meets."""
        for name in attributes:
            self._loose.setdefault(name, set()).update(here)

    def _weigh(self) -> None:
        """Find the place of each tensor, and the bytes at each place."""
        owners: dict[int, set[int]] = {}
        tensors: dict[str, Tensor] = dict(self.network.named_parameters(remove_duplicate=False))
        tensors |= dict(self.network.named_buffers(remove_duplicate=False))
        inside = {unit + ".": place for unit, place in self.units.items()}
        for name, tensor in tensors.items():
            unit = next((place for prefix, place in inside.items() if name.startswith(prefix)), None)
            met = self._loose.get(name, {0}) if unit is None else {unit}
            self.tensors[name] = min(met)
            owners.setdefault(id(tensor), set()).update(met)
        self._together += [places for places in owners.values() if len(places) > 1]  # tied, or used at several places
        self._weights = [0] * len(self.units)
        for name, tensor in tensors.items():
            if self._weights and owners.pop(id(tensor), set()):
                self._weights[self.tensors[name]] += tensor.nbytes


def _enter(value: Any, module: str) -> Any:
    """In a traced network: a value as it is within a module, which may have moved it to its device."""
    return value


class _Tracer(fx.Tracer):
    """Traces down to torch's own modules and innermost ones, and notes where values enter those that it looks into."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is taken as a whole."""
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


class _Coarse(_Tracer):
    """Looks into nothing but the network itself and sequences in it: a part of it may be beyond tracing."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is taken as a whole."""
        return type(m).forward is not nn.Sequential.forward


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _gives_no_tensor(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in NO_TENSOR
    return node.op == "call_function" and node.target is getattr and node.args[1] in NO_TENSOR


def balanced(weights: Sequence[int], allowed: Sequence[int], parts: int) -> list[int]:
    """Where to cut a row of weights so that the heaviest part is as light as can be.

    Args:
        weights: of the places, in order.
        allowed: places before which a cut may be, ascending; at least parts - 1.
        parts: at least 1.

    Returns:
        The first places of all parts but the first.

    >>> balanced([1, 1, 1, 3], allowed=[1, 2, 3], parts=2)
    [3]
    """
    sums = [0, *accumulate(weights)]
    ends = [*allowed, len(weights)]
    best: list[tuple[int, list[int]]] = [(sums[end], []) for end in ends]  # with one part, up to each end
    for _ in range(parts - 1):
        longer: list[tuple[int, list[int]]] = []
        for number, end in enumerate(ends):
            options = [
                (max(heaviest, sums[end] - sums[start]), [*starts, start])
                for (heaviest, starts), start in zip(best[:number], ends[:number], strict=True)
                if starts is not None
            ]
            longer.append(min(options, default=(sums[-1] + 1, [])))
        best = longer
    return best[-1][1]


class _Generators:
    """Lets each device go on with the random numbers where the one before has stopped.

    So dropout in a cut network draws what it would draw on one device. On the CPU there is one generator anyway.
    """

    def __init__(self, home: torch.device) -> None:
        self._at = home

    def go(self, device: torch.device) -> None:
        """The next random numbers are drawn on this device."""
        if device.type == "cuda" and device != self._at:
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(self._at), device)  # on the host; no wait
            self._at = device


class _Arrival:
    """Moves a module's inputs to its device."""

    def __init__(self, device: torch.device, generators: _Generators) -> None:
        self.device, self.generators = device, generators

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.generators.go(self.device)
        return to_device(args, self.device), to_device(kwargs, self.device)


class _Return:
    """Moves a network's outputs to the rank's first device, where labels are."""

    def __init__(self, device: torch.device, generators: _Generators) -> None:
        self.device, self.generators = device, generators

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        self.generators.go(self.device)
        return to_device(output, self.device)


@contextmanager
def devices_explained(model: nn.Module) -> Iterator[None]:
    """Say in a line what tensors on two devices mean where the model is on several.

    Raises:
        Ended: instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if "on the same device" not in str(error) or len({p.device for p in model.parameters()}) < 2:
            raise
        raise Ended(
            "the model is on several devices, and its code or the task's loss combines tensors of two of them; move "
            f"one with .to(other.device): {str(error).splitlines()[0]}"
        ) from error

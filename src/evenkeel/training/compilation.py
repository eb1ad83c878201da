"""`--compile`: `torch.compile` in place and inside DDP, so that names in checkpoints stay the same.

A graph must not depend on what was compiled before it, or a resumed run would compute other bits than an undisturbed
one. dynamo's default does depend on it: the second shape that it meets becomes a dynamic one. So here each shape has
its own graph, and with exact bits the whole model is one graph, whatever DDP's buckets are.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..common.errors import Refusal
from ..common.phases import COMPILATION, activity

log = logging.getLogger(__name__)

SHAPES = 64
"""Shapes for which one network is compiled. A run has a few: full and short micro-batches."""

EXACT = {
    "deterministic": True,  # from torch 2.9 on: no kernel is chosen by its speed
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
"""Settings of inductor that make two compilations produce the same code."""


def compile_networks(
    model: nn.Module, device: torch.device, exact: bool, whole: bool, parts: Sequence[nn.Module] = ()
) -> None:
    """Compile a model, or each network of an `nn.ModuleDict`, or these parts, at the first call with each shape.

    Args:
        model: on its device, or yet to be divided.
        device: where it is.
        exact: produce the same code each time, and raise an error instead of running a shape uncompiled.
        whole: make one graph, which computes the same with and without DDP. Otherwise DDP cuts it at its buckets, to
            send a part of the gradient while the rest is computed.
        parts: modules to compile one by one, in place of the model (--shard on).
    """
    _require_compiler(device)
    import torch._dynamo.callback
    import torch._inductor.config as inductor

    dynamo: Any = torch._dynamo.config
    dynamo.assume_static_by_default, dynamo.automatic_dynamic_shapes = True, False
    # parts of one class share what is compiled of it
    dynamo.recompile_limit = SHAPES * max(1, len(parts))
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, dynamo.recompile_limit)
    dynamo.fail_on_recompile_limit_hit = exact
    dynamo.optimize_ddp = not whole
    # precompiled headers lie outside the cache, and each start would call the compiler for them
    for name, value in {"cpp_cache_precompile_headers": False, **(EXACT if exact else {})}.items():
        if hasattr(inductor, name):  # not every release has all of them
            setattr(inductor, name, value)
    progress.wanted = True
    torch._dynamo.callback.callback_handler.register_start_callback(progress.begin)
    torch._dynamo.callback.callback_handler.register_end_callback(progress.end)
    for network in parts or (model.children() if isinstance(model, nn.ModuleDict) else [model]):
        network._compiled_call_impl = torch.compile(_call(network), dynamic=False)


def in_place(model: nn.Module) -> nn.Module:
    """A model without the wrappers of a task's own `torch.compile`, whose prefix would be in all names of a checkpoint.
    The wrapped modules are compiled in place instead, with the same settings."""
    if "_orig_mod" in model._modules:
        wrapper: Any = model
        found = in_place(wrapper._orig_mod)
        found._compiled_call_impl = wrapper.dynamo_ctx(_call(found))
        for name, hooks in vars(wrapper).items():  # registered on the wrapper
            if name.endswith("_hooks") and hooks:
                getattr(found, name).update(hooks)
        return found
    for name, child in model._modules.items():
        if child is not None and (found := in_place(child)) is not child:
            model._modules[name] = found
    return model


def _call(network: nn.Module) -> Any:
    """The function that `nn.Module.compile` compiles: the call of a network, with its hooks.

    dynamo skips frames in torch's own files. So torch 2.8 to 2.11 compile nothing of an `nn.Sequential`,
    unless its caller is in another file.
    """
    call: Any = network._call_impl
    if not type(network).forward.__module__.startswith("torch.nn."):
        return call
    return lambda *args, **kwargs: call(*args, **kwargs)


def _require_compiler(device: torch.device) -> None:
    missing = ""
    if device.type == "cuda":
        from torch.utils._triton import has_triton_package

        if not has_triton_package():
            missing = "Triton on a GPU; install it (pip install triton)"
        elif not any(map(shutil.which, ("gcc", "clang", "cc"))):
            missing = "a C compiler for Triton and there is none on PATH; install gcc"
    elif not compiler_version():
        missing = "a C++ compiler on a CPU and there is none on PATH; install g++, name another one in CXX"
    elif not Path(headers := sysconfig.get_path("include"), "Python.h").exists():
        missing = f"Python's headers on a CPU and {headers} has no Python.h; install them (python3-dev)"
    if missing:
        raise Refusal(f"--compile: needs {missing}, or leave --compile out")


def compiler_version() -> str:
    """The first line that inductor's C++ compiler prints for --version; empty if there is none."""
    import torch._inductor.config as inductor

    found: Any = inductor.cpp.cxx
    for name in filter(None, found if isinstance(found, (list, tuple)) else [found]):
        try:
            told = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return told.stdout.partition("\n")[0]
    return ""


def facts(device: torch.device) -> dict[str, str]:
    """Facts on which the bits of compiled code depend: parts of a fingerprint."""
    import torch._inductor.config as inductor

    settings = inductor.get_config_copy()
    names = (*EXACT, "fallback_random", "emulate_precision_casts", "cpp.simdlen", "cpp.threads")
    told = " ".join(f"{name}={settings[name]}" for name in names if name in settings)
    if device.type == "cuda":
        import triton

        return {"compiler": f"triton {triton.__version__}", "inductor": told}
    return {"compiler": compiler_version(), "inductor": told}


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled networks run uncompiled."""
    return torch.compiler.set_stance("force_eager") if progress.wanted else nullcontext()


class Progress:
    """The compilations of this process and their time. Compilation is a phase, so that waiting ranks can report it."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether this process compiles anything."""
        self.times, self.seconds = 0, 0.0
        """Compilations so far, each of a graph or a part of one, and their seconds."""
        self._before, self._began = "", 0.0

    def report(self) -> dict[str, int | float]:
        """Compilations, seconds, and graphs found in inductor's cache (hits) or not (misses). Warns if there is no
        graph."""
        from torch._dynamo.utils import counters

        hits, misses = (counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
        if not hits + misses:
            log.warning(
                "--compile: nothing has been compiled: loss() must call the model itself (of an nn.ModuleDict: its "
                "networks); TORCH_LOGS=graph_breaks shows what dynamo cannot trace"
            )
        return {"times": self.times, "seconds": round(self.seconds, 3), "hits": hits, "misses": misses}

    def begin(self, *_: object) -> None:
        """dynamo calls this before it compiles."""
        log.info("compiling, for step %d", activity.step + 1)
        self._before, self._began = activity.phase, time.monotonic()
        activity.enter(COMPILATION)

    def end(self, *_: object) -> None:
        """dynamo calls this afterwards, even if it has failed."""
        seconds = time.monotonic() - self._began
        activity.enter(self._before)
        self.times += 1
        self.seconds += seconds
        log.info("compiled in %.2f s", seconds)


progress = Progress()
"""Compilation in this process."""

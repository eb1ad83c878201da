"""`--compile`: the model by `torch.compile`, in place and inside DDP, so that no name in a checkpoint changes.

A graph must not depend on what was compiled before it, or a run that was resumed would compute other bits than one that
never stopped. dynamo's default does depend on it: it makes the second shape that it meets a dynamic one. So here each
shape has a graph of its own, and with exact bits the whole model is in one, whatever DDP's buckets are.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sysconfig
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .activity import COMPILATION, activity
from .errors import Refusal

log = logging.getLogger(__name__)

SHAPES = 64
"""Shapes for which one network is compiled. A run has a few: full and short micro-batches."""

LONGEST = 3600
"""Seconds that a compilation may take before it counts as a hang."""

EXACT = {
    "deterministic": True,  # from torch 2.9 on: no kernel is chosen by a measurement
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
"""inductor's settings where two compilations must come to the same code."""

TOLD = (*EXACT, "fallback_random", "emulate_precision_casts", "cpp.simdlen", "cpp.threads")
"""inductor's settings by which the last bits may differ: a part of the fingerprint."""


def compile_networks(model: nn.Module, device: torch.device, exact: bool, whole: bool) -> None:
    """Let calls of the model run compiled code, which is made at the first call with each shape.

    Args:
        model: on its device. Of an `nn.ModuleDict` each network is compiled.
        device: where it is.
        exact: compile to the same code each time, and end where a shape would go uncompiled.
        whole: one graph, which computes the same under DDP and without it. If not, DDP cuts it at its buckets and sends
            a part of the gradient while the rest is computed.

    Raises:
        Refusal: there is no compiler.
    """
    require_compiler(device)
    import torch._dynamo.callback
    import torch._inductor.config as inductor

    dynamo: Any = torch._dynamo.config
    dynamo.assume_static_by_default, dynamo.automatic_dynamic_shapes = True, False
    dynamo.recompile_limit = SHAPES
    dynamo.fail_on_recompile_limit_hit = exact
    dynamo.optimize_ddp = not whole
    # headers that are compiled beforehand lie outside the cache, and each start would ask the compiler about them
    settings = {"cpp_cache_precompile_headers": False} | (EXACT if exact else {})
    for name, value in settings.items():  # not all are in all releases
        if hasattr(inductor, name):
            setattr(inductor, name, value)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_tell_of_too_many_shapes)
    progress.wanted = True
    torch._dynamo.callback.callback_handler.register_start_callback(progress.begin)
    torch._dynamo.callback.callback_handler.register_end_callback(progress.end)
    for network in model.children() if isinstance(model, nn.ModuleDict) else [model]:
        network.compile(dynamic=False)


def in_place(model: nn.Module) -> nn.Module:
    """A model without the modules that `torch.compile` puts around others, and whose name would be in all names of a
    checkpoint: what they hold is compiled in its place, in the way that was asked for."""
    if "_orig_mod" in model._modules:
        wrapper: Any = model
        found = in_place(wrapper._orig_mod)
        found._compiled_call_impl = wrapper.dynamo_ctx(found._call_impl)
        for name, hooks in vars(wrapper).items():  # that were registered since
            if name.endswith("_hooks") and hooks:
                getattr(found, name).update(hooks)
        return found
    for name, child in model._modules.items():
        if child is not None and (found := in_place(child)) is not child:
            model._modules[name] = found
    return model


def require_compiler(device: torch.device) -> None:
    """Refuse to begin what would fail in the first step.

    Raises:
        Refusal: inductor has no compiler for the device.
    """
    if device.type == "cuda":
        from torch.utils._triton import has_triton_package

        if not has_triton_package():
            raise Refusal("--compile: needs Triton on a GPU; install it (pip install triton), or leave --compile out")
        if not (shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
            raise Refusal(
                "--compile: Triton needs a C compiler and there is none on PATH; install gcc, or leave --compile out"
            )
        return
    if not compiler_version():
        raise Refusal(
            "--compile: needs a C++ compiler on a CPU and there is none on PATH; install g++, name another one in CXX, "
            "or leave --compile out"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise Refusal(
            f"--compile: needs Python's headers on a CPU and {headers} has no Python.h; install them (python3-dev), or "
            "leave --compile out"
        )


def compiler_version() -> str:
    """The first line of what inductor's C++ compiler says of itself; empty if there is none."""
    import torch._inductor.config as inductor

    found: Any = inductor.cpp.cxx
    for name in found if isinstance(found, (list, tuple)) else [found]:
        try:
            told = subprocess.run([name, "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.SubprocessError, TypeError):
            continue
        return told.stdout.partition("\n")[0]
    return ""


def facts(device: torch.device) -> dict[str, str]:
    """What the bits of compiled code depend on besides all else: parts of a fingerprint."""
    import torch._inductor.config as inductor

    settings = inductor.get_config_copy()
    told = " ".join(f"{name}={settings[name]}" for name in TOLD if name in settings)
    if device.type == "cuda":
        import triton

        return {"compiler": f"triton {triton.__version__}", "inductor": told}
    return {"compiler": compiler_version(), "inductor": told}


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled networks run as they were written, and nothing is compiled."""
    return torch.compiler.set_stance("force_eager") if progress.wanted else nullcontext()


def too_many_shapes(error: BaseException) -> bool:
    """Whether an error says that a network was not compiled because it had been for many shapes already."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


class Progress:
    """What compilation has cost this process. It is a phase of its own, so that ranks that wait know for what."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether this process compiles anything."""
        self.times = 0
        """Compilations so far, each of a graph or of a piece of one."""
        self.seconds = 0.0
        """What they took."""
        self._before, self._began = "", 0.0

    def report(self) -> dict[str, int | float]:
        """For a record: compilations and seconds so far, and how many graphs came out of inductor's cache or not.

        Warns if there is no graph at all.
        """
        from torch._dynamo.utils import counters

        found = counters["inductor"]
        hits, misses = (found[f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
        if not hits + misses:
            log.warning(
                "--compile: nothing has been compiled: loss() must call the model itself (of an nn.ModuleDict: its "
                "networks); TORCH_LOGS=graph_breaks shows what dynamo does not understand"
            )
        return {"times": self.times, "seconds": round(self.seconds, 3), "hits": hits, "misses": misses}

    def begin(self, *_: object) -> None:
        """Called by dynamo before it compiles."""
        log.info("compiling, for step %d", activity.step + 1)
        self._before, self._began = activity.phase, time.monotonic()
        activity.enter(COMPILATION)

    def end(self, *_: object) -> None:
        """Called by dynamo afterwards, also where it has failed."""
        seconds = time.monotonic() - self._began
        activity.enter(self._before)
        self.times += 1
        self.seconds += seconds
        log.info("compiled in %.2f s", seconds)


progress = Progress()
"""This process's own."""


def _tell_of_too_many_shapes(record: logging.LogRecord) -> bool:
    """Say in a line of ours what dynamo says in a paragraph; a filter of its log."""
    if "recompile_limit" not in record.getMessage():
        return True
    log.warning(
        "--compile: a network has been compiled for %d shapes, and others run uncompiled from now on: slower, and with "
        "other last bits; pad batches to a few shapes, or leave --compile out",
        SHAPES,
    )
    return False

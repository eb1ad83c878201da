"""What the bits of a run depend on besides its options: the machine, the libraries, the code.

A resume compares this with the checkpoint's, and the ranks compare theirs with each other. It does not include the
number of ranks, nor anything else that may change during a run, nor the data, which would have to be read. torch is
imported where it is used, so that two runs can be compared without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import Refusal
from ..common.naming import listed, name_ranks

if TYPE_CHECKING:
    import torch

    from ..config import Config
    from ..distributed.world import World
    from ..training.task import Task
    from .manifest import Manifest

Fingerprint = Mapping[str, str]
Differences = dict[str, tuple[str, str]]
"""Part -> (old, new)."""

UNSET = "(none)"

MICRO_BATCH = "micro_batch"
"""The part that says how steps are cut. It may change when a run is continued, with a warning."""

ENVIRONMENT = (
    *("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"),
)
"""Variables that make libraries choose other kernels or another order of adding; torch does not report them."""

COMPUTING = ("data", "distributed", "training", "tasks")
"""Components of Evenkeel whose code counts. The others compute no numbers that reach the weights."""


OURS = "code:evenkeel/"
"""How the parts begin that are Evenkeel's own code."""


def fingerprint_of_run(config: Config, task: Task, world: World) -> dict[str, str]:
    """What this run's bits depend on here; the cut is added when it is decided."""
    from ..distributed.data_parallel import replicas
    from ..training import compilation

    facts = fingerprint(task, world.device)
    if (gpus := len(replicas(config.strategy, world.device))) > 1:
        facts["strategy"] = f"dp on {gpus} GPUs"
    if config.shard != "off":
        facts["shard"] = "on"  # the norm and the optimizer's arithmetic are others
    return facts | (compilation.facts(world.device) if config.compile else {})


def fingerprint(task: Task, device: torch.device) -> dict[str, str]:
    """All that the bits of a run depend on here, besides the options in its config.toml: plain strings by part.

    docs/reproducibility.md says why each part counts. Parts that do not apply are left out.

    Args:
        task: whose code counts.
        device: where the model is.
    """
    import numpy as np
    import torch

    from ..training.determinism import matmul_precision

    build = [line for line in torch.__config__.show().splitlines() if "CPU capability usage" not in line]
    parts = {
        "python": ".".join(platform.python_version_tuple()[:2]),  # its `random` may shuffle differently
        "torch": str(torch.__version__),  # which is no plain string
        "torch_build": short_digest("\n".join(build).encode()),
        "numpy": np.__version__,
        "architecture": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": str(torch.backends.mkldnn.enabled),
        "mkl": str(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
        "device": device.type,
        "device_model": _gpu_model(device) if device.type == "cuda" else _cpu_model(),
    }
    for name, module in (("torchvision", "torchvision"), ("torchcodec", "torchcodec"), ("pillow", "PIL")):
        if module in sys.modules:
            parts[name] = getattr(sys.modules[module], "__version__", UNSET)
    if device.type == "cuda":
        parts |= _gpu_libraries()
    parts |= {f"env:{name}": os.environ[name] for name in ENVIRONMENT if name in os.environ}
    # the text counts, comments included: a digest cannot tell whether an edit changes a result
    others = {name: short_digest(path.read_bytes()) for name, path in _code(type(task)) if name not in _of_forks}
    return parts | _of_forks | others


def remember_code(task: type[Task]) -> None:
    """In a keeper: note the code that it has loaded, which its forks run whatever is on the disk by then."""
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    _of_forks.update({name: short_digest(path.read_bytes()) for name, path in _code(task) if str(path) in loaded})


_of_forks: dict[str, str] = {}


def edited(task: type[Task]) -> list[str]:
    """The user's files that a keeper has noted and that are others, or gone, on the disk by now."""
    now = dict[str, str]()
    for name, path in _code(task):
        if not name.startswith(OURS):
            with contextlib.suppress(OSError):  # gone, or not readable any more
                now[name] = short_digest(path.read_bytes())
    theirs = {name: digest for name, digest in _of_forks.items() if not name.startswith(OURS)}
    return [name.removeprefix("code:") for name, digest in theirs.items() if now.get(name) != digest]


def differences(old: Fingerprint, new: Fingerprint) -> Differences:
    """The parts that differ, in the new one's order; a checkpoint too old to have a fingerprint is one difference."""
    if not old:
        return {"fingerprint": (UNSET, "kept")}
    names = [*new, *(name for name in old if name not in new)]
    return {n: (old.get(n, UNSET), new.get(n, UNSET)) for n in names if old.get(n) != new.get(n)}


def rank_differences(fingerprints: Sequence[Fingerprint]) -> Differences:
    """How other ranks differ from rank 0, given all of them in order; each part names its ranks."""
    groups: dict[tuple[str, tuple[str, str]], list[int]] = {}
    for rank, theirs in enumerate(fingerprints):
        for part in differences(fingerprints[0], theirs).items():
            groups.setdefault(part, []).append(rank)
    return {f"{name} of {name_ranks(ranks)}": values for (name, values), ranks in groups.items()}


def describe(found: Differences, most: int = 8) -> str:
    """Differences in a line: "threads 1 -> 2, numpy 2.1 -> 2.2"; of many only the first ones.

    Files of another version of Evenkeel would be a long list, so they are only counted.
    """
    ours = [name for name in found if name.startswith(OURS)]
    code = []
    if any(UNSET in found[name] for name in ours):
        code = [f"Evenkeel is another version ({len(ours)} files of its code differ)"]
        found = {name: values for name, values in found.items() if name not in ours}
    return listed(code + [f"{name} {old} -> {new}" for name, (old, new) in found.items()], most)


def compare_bits(present: Sequence[Fingerprint], manifest: Manifest | None, strict: bool) -> Differences:
    """Why the bits of an attempt might differ from those of an undisturbed run, by the present fingerprint of each rank
    and the manifest of the checkpoint that is continued. Raises a Refusal if they might, with --strict-bits."""
    found: Differences = {}
    if manifest:
        before = manifest.fingerprint
        if before and MICRO_BATCH in present[0]:  # an old manifest lacks the cut; it was the present one
            before = {MICRO_BATCH: present[0][MICRO_BATCH]} | before
        found = differences(before, present[0])
    found |= rank_differences(present)
    if found and strict:
        raise Refusal(
            f"--strict-bits: from step {manifest.step if manifest else 0} on the bits might differ: {describe(found)}; "
            "restore that, or continue without --strict-bits"
        )
    return found


def read_cut(text: str) -> tuple[str, int]:
    """The option and its value that make a cut, from the description by `Plan.cut`.

    >>> read_cut("1/3 of a step"), read_cut("a whole step"), read_cut("4")
    (('micro_batches', 3), ('micro_batches', 1), ('micro_batch', 4))
    """
    if text.isdecimal():
        return "micro_batch", int(text)
    number = text.removeprefix("1/").removesuffix(" of a step")
    return "micro_batches", 1 if number == "a whole step" else int(number)


def cut_in_words(cut: str) -> str:
    """What a step was cut into, from `Plan.cut` as recorded.

    >>> cut_in_words("1/3 of a step"), cut_in_words("a whole step"), cut_in_words("4")
    ('3 micro-batches', '1 micro-batch', 'micro-batches of 4 samples')
    """
    option, value = read_cut(cut)
    if option == "micro_batch":
        return f"micro-batches of {value} samples"
    return f"{value} micro-batch{'es' if value > 1 else ''}"


def _cpu_model() -> str:
    """Vendor, family, model and name from Linux; a virtual machine's name alone says little."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    return " ".join(known[name] for name in names if name in known) or platform.processor()


def _gpu_model(device: torch.device) -> str:
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.multi_processor_count} multiprocessors, capability {found.major}.{found.minor}"


def _gpu_libraries() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    cudnn: Any = torch.backends.cudnn  # without types
    nccl: Any = torch.cuda.nccl
    by_nccl = dist.is_nccl_available() and (not dist.is_initialized() or "nccl" in dist.get_backend_config())

    def tf32(backend: Any) -> str:
        # releases that know `fp32_precision` raise where a program has used it and then asks for `allow_tf32`
        return str(backend.fp32_precision if hasattr(backend, "fp32_precision") else backend.allow_tf32)

    return {
        "cuda": str(torch.version.cuda or torch.version.hip),
        "cudnn": str(cudnn.version()),
        "nccl": str(nccl.version()) if by_nccl else UNSET,  # ranks that share a GPU add by gloo
        "tf32_matmul": tf32(torch.backends.cuda.matmul),
        "tf32_cudnn": tf32(getattr(cudnn, "conv", cudnn)),
        "cudnn_benchmark": str(cudnn.benchmark),
        "cudnn_deterministic": str(cudnn.deterministic),
    }


def _code(task: type[Task]) -> list[tuple[str, Path]]:
    return [(f"code:{name}", path) for name, path in sorted(_sources(task))]


def _sources(task: type[Task]) -> Iterator[tuple[str, Path]]:
    """(name, file) of the code that computes: Evenkeel's, the main program, and the task's file with the modules of its
    folder or package that are loaded."""
    package = Path(__file__).parents[1]
    for part in COMPUTING:
        yield from ((f"evenkeel/{path.relative_to(package)}", path) for path in package.glob(f"{part}/**/*.py"))
    if main := getattr(sys.modules["__main__"], "__file__", None):
        yield Path(main).name, Path(main)
    own = sys.modules[task.__module__]
    top = sys.modules[own.__name__.partition(".")[0]]  # of a file: that file itself
    files = (getattr(module, "__file__", None) for module in (top, own))  # a notebook has none
    folder = Path(next(filter(None, files), "")).parent
    if folder.is_relative_to(package):
        return
    others = [package, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
    outside = [path for path in others if not folder.is_relative_to(path)]
    for module in list(sys.modules.values()):
        file = Path(name) if (name := str(getattr(module, "__file__", ""))).startswith(f"{folder}{os.sep}") else None
        if file and file.is_file() and not any(map(file.is_relative_to, outside)):
            yield str(file.relative_to(folder)), file


def short_digest(content: bytes) -> str:
    """64 bits of a SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]

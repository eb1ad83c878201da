"""`checkpoint export --onnx FILE` and `--as transformers`: the model of a checkpoint for other programs.

The model is the task's, on the CPU, in evaluation mode. Both write beside the place, and rename what is complete.
"""

from __future__ import annotations

import inspect
import io
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..common.errors import Ended, Refusal
from ..common.files import temporary_name
from ..common.naming import kind_of, listed
from ..config import Config
from ..data.loader import Seeded
from ..data.plan import Plan
from ..data.sampler import Indices
from ..run.build import build_model
from ..tasks.command_line import parse_as_recorded
from ..training.task import Task, defines
from ..training.task_data import evaluation_sets, training_set

LARGEST = 2**31 - 2**20
"""Bytes of weights that fit into one file: protobuf's limit, less the graph."""

TOLERANCE = 1e-3
"""Largest difference between the outputs of onnxruntime and torch, as a share of the largest output."""


@dataclass(frozen=True)
class Call:
    """How the task calls its model."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs, in order."""
        return [leaf for leaf in pytree.tree_leaves((self.arguments, self.keywords)) if isinstance(leaf, Tensor)]


class _Called(BaseException):
    """Ends the task's code once it has called the model; not an error that the code might catch."""


def built(run: Path, weights: Mapping[str, Any], train_options: list[str]) -> tuple[Config, Task, nn.Module]:
    """The options and task of a run, and its model with these weights."""
    if not (run / "config.toml").is_file():
        raise Refusal(f"{run}: has no config.toml, and the model is made by the run's options; name a run directory")
    config, task = parse_as_recorded(run, train_options)
    model = build_model(config, task)
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        what = " ".join(str(error).split())[:300]
        raise Ended(f"{run}: the task's model has changed since the checkpoint: {what}") from None
    return config, task, model.eval()


def write_onnx(config: Config, task: Task, model: nn.Module, path: Path) -> str:
    """Export a model by torch.onnx, verify the file, and return how it was verified.

    Raises:
        Refusal: the model is not called as a whole, or is too large for one file.
        Ended: torch cannot export it, or the file does not compute the same.
    """
    size = sum(tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, Tensor))
    if size > LARGEST:
        raise Refusal(
            f"--onnx {path}: the model has {size:,} bytes, and a .onnx file at most {LARGEST:,}; export weights"
        )
    call = example_call(config, task, model, samples=2)
    with _complete(path) as temporary, torch.no_grad():
        try:
            with _quietly():
                program: Any = torch.onnx.export(
                    model, call.arguments, kwargs=call.keywords, dynamo=True, verbose=False,
                    dynamic_shapes=_shapes(model, call),
                )  # fmt: skip
                program.save(temporary, external_data=False)
        except Exception as error:  # of many kinds
            raise Ended(f"--onnx {path}: torch cannot export this model: {_line(error)}") from error
        if not find_spec("onnxruntime"):
            import_module("onnx").checker.check_model(str(temporary), full_check=True)
            return "checked by onnx; pip install onnxruntime also compares the outputs"
        return _compared(temporary, path, model, [call, example_call(config, task, model, samples=3)])


def _line(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def example_call(config: Config, task: Task, model: nn.Module, samples: int) -> Call:
    """How the task calls its model to predict, else for its metrics, for the first samples of its data."""
    dataset = next(iter(evaluation_sets(task, config).values()), None) or training_set(task, config, unchanged=True)
    size = min(samples, len(dataset))
    (place,) = Plan(size, size, size, epochs=1).micro_batches(0, 0, 1)
    batch = Seeded(dataset, config.seed, "export").__getitems__(Indices(range(size), 0, place))
    found: list[Call] = []

    def note(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append(Call(arguments, keywords))
        raise _Called

    compute: Callable[..., Any] = task.predict if defines(type(task), "predict") else task.metrics
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            compute(model, batch)
    except _Called:
        return found[0]
    finally:
        hook.remove()
    parts = listed([name for name, _ in model.named_children()])
    raise Refusal(
        f"--onnx: {compute.__name__}() of the task calls parts of the model ({parts}) and not the model itself, "
        f"{kind_of(model)}; export their weights (--output FILE)"
    )


def _shapes(model: nn.Module, call: Call) -> Any:
    """For torch.export: the first dimension of each input is the number of samples, which may be another one."""
    samples = call.tensors[0].shape[0] if call.tensors and call.tensors[0].dim() else 0

    def of(leaf: Any) -> Any:
        many = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples > 1
        return {0: torch.export.Dim.AUTO} if many else None

    if not call.keywords:
        return pytree.tree_map(of, call.arguments)
    named = inspect.signature(model.forward).bind(*call.arguments, **call.keywords).arguments
    return {name: pytree.tree_map(of, value) for name, value in named.items()}


def _compared(file: Path, path: Path, model: nn.Module, calls: list[Call]) -> str:
    """Run a .onnx file, and compare with the model; ended if the outputs differ."""
    session = import_module("onnxruntime").InferenceSession(str(file), providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    free = bool(inputs) and isinstance(inputs[0].shape[0], str)
    largest = 0.0
    for call in calls if free else calls[:1]:
        feed = {it.name: tensor.numpy() for it, tensor in zip(inputs, call.tensors, strict=True)}
        outputs = pytree.tree_leaves(model(*call.arguments, **call.keywords))
        expected = [it for it in outputs if isinstance(it, Tensor)]
        for theirs, ours in zip(session.run(None, feed), expected, strict=True):
            largest = max(largest, _difference(torch.as_tensor(theirs), ours))
    if not largest <= TOLERANCE:
        raise Ended(f"--onnx {path}: onnxruntime's outputs differ from torch's by {largest:.2g}; nothing was written")
    many = "any number of samples" if free else f"batches of {len(calls[0].tensors[0])} samples only"
    return f"onnxruntime's outputs are torch's within {largest:.1g}, for {many}"


def _difference(theirs: Tensor, ours: Tensor) -> float:
    """The largest difference, as a share of the largest number, or of 1 if that is less."""
    if theirs.shape != ours.shape:
        return math.inf
    scale = max(1.0, float(ours.double().abs().max())) if ours.numel() else 1.0
    return float((theirs.double() - ours.double()).abs().max()) / scale if ours.numel() else 0.0


def write_pretrained(model: nn.Module, path: Path) -> None:
    """Write the folder of a model that has `save_pretrained`, as those of transformers; refused for others."""
    if not callable(save := getattr(model, "save_pretrained", None)):
        raise Refusal(
            f"--as transformers: the task's model, {type(model).__name__}, has no save_pretrained(folder); use another "
            "--as, or return a model of transformers"
        )
    with _complete(path) as temporary, _quietly():
        save(temporary)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the libraries' progress bars, warnings and notes; errors are raised all the same."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A path beside another, to write a file or folder there; renamed at the end of the block."""
    temporary = temporary_name(path)
    try:
        yield temporary
        if os.path.lexists(path):
            raise Refusal(f"{path}: exists by now; name another file")
        temporary.rename(path)
    except OSError as error:
        raise Ended(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.unlink(missing_ok=True)

"""A task: data, model, loss and metrics. The one thing a user of the template writes.

    class MyTask(Task):
        def train_dataset(self): ...
        def test_dataset(self): ...
        def model(self): ...
        def loss(self, model, batch): ...
        def metrics(self, model, batch): ...

Make it a dataclass and its fields become command-line options, with their docstrings as help. The built-in tasks are
modules of their own.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .checked_metrics import one_number
from .config import Config
from .data import SizedDataset
from .errors import Refusal, place_of
from .optimization import build_optimizer, rate


class Task(ABC):
    """What is trained on what. Methods run on every rank; none of them needs to know that there are ranks.

    A *batch* is what `torch.utils.data.default_collate` makes of a micro-batch of samples, on the device of
    the model.
    """

    best: ClassVar[tuple[str, Literal["max", "min"]] | None] = ("accuracy", "max")
    """The metric by which the best checkpoint is kept; None: no metric is."""

    unused_parameters: ClassVar[bool] = False
    """Set it if some parameters get no gradient in some steps; DDP then looks for them, which costs time."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Options of the task, as config.toml names them, that may change when a run is continued. All others shape the
    result; only `data_dir` may always change."""

    earlier: ClassVar[Mapping[str, Any]] = {}
    """What options that are newer than a run were in it, by name, where that is not None."""

    @abstractmethod
    def train_dataset(self) -> SizedDataset:
        """Any map-style data set; random augmentation may use torch's, NumPy's or Python's generator."""

    @abstractmethod
    def test_dataset(self) -> SizedDataset:
        """The data of the evaluation."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The network, on the CPU, with random weights (the generators are seeded). Several networks: an
        `nn.ModuleDict` of them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss over a batch, a scalar with a gradient. Several losses: their sum."""

    @abstractmethod
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Values of each sample, every tensor of shape [samples, ...]; their means over all samples are what
        `summarize` gets. Runs without gradients, the model in evaluation mode; once on a micro-batch of the test data
        before the first step."""

    def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
        """From means over all test samples (float64) to the numbers that are reported."""
        return {name: one_number(name, mean) for name, mean in means.items()}

    def optimizers(self, model: nn.Module, config: Config) -> list[Optimizer]:
        """One by --optimizer over all parameters. A task with several networks may return one for each."""
        return [build_optimizer(model.parameters(), config)]

    def rates(self, config: Config, step: int, total_steps: int) -> float | Sequence[float]:
        """The factor on the peak learning rates at a step, or a list with one for each optimizer."""
        return rate(config, step, total_steps)

    def takes_one_sample(self, model: nn.Module) -> bool:
        """Whether a micro-batch of one sample can be trained on. Asked before the start if there would be one and the
        model has BatchNorm, which needs two values for each channel: two samples, or an image of more than a pixel."""
        return True

    def resolved(self, recorded: Mapping[str, Any] | None) -> Task:
        """The task with the options settled that were left open; default: itself.

        Args:
            recorded: all options of the run that is continued; None: a new run begins.
        """
        return self

    def options(self) -> dict[str, Any]:
        """The task's own options and their values, but for secrets; none unless it is a dataclass."""
        values: dict[str, Any] = dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}
        described = getattr(self, "__dataclass_fields__", {})
        return {option_name(name): it for name, it in values.items() if not described[name].metadata.get("secret")}


def secret() -> Any:
    """The field of an option that is written, compared, sent and shown nowhere: ``token: str = secret()``."""
    return dataclasses.field(default="", repr=False, metadata={"secret": True})


class Classification(Task):
    """(image, label) data: cross-entropy and accuracy. A subclass brings the data and the model."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Cross-entropy and top-1 accuracy of each image."""
        images, labels = batch
        logits = model(images)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="none"),
            "accuracy": logits.argmax(1) == labels,
        }


def constants(module: nn.Module) -> dict[str, Tensor]:
    """A network's parameters by name, detached: what goes through it with these does not reach its own gradients.

    For `torch.func.functional_call(network, constants(network), inputs)` in a loss of one network by way of another.
    With --strategy dp the loss gets a replica of the network. That has no parameters as torch counts them
    (`named_parameters()` is empty), but they are there, by the names they had.
    """
    detached: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    # one that has two names stays one, as `functional_call` demands
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in getattr(part, "_former_parameters", part._parameters).items():
            if parameter is not None:
                constant = detached.setdefault(id(parameter), parameter.detach())
                found[f"{prefix}.{name}" if prefix else name] = constant
    return found


BUILT_IN = {
    "classify": "evenkeel.classify:Classify",
    "regress": "evenkeel.regress:Regress",
    "segment": "evenkeel.segment:Segment",
}
"""Tasks by name, imported when they are asked for."""

GONE = {"digits": "--task classify --dataset digits, both of which are the defaults"}
"""What is no task any more, and what it is now."""


def option_name(field: str) -> str:
    """The option of a field. One that would hide a method of the task has an underscore at its end, the option not."""
    return field.rstrip("_")


def load_task(name: str) -> type[Task]:
    """The class behind --task: a built-in by name, else FILE.py:CLASS or PACKAGE.MODULE:CLASS.

    Raises:
        Refusal: no such task, or its file fails to import (says at which line and why).
    """
    if name in GONE:
        raise Refusal(f"--task {name}: is now {GONE[name]}")
    source, colon, attribute = BUILT_IN.get(name, name).rpartition(":")
    if not colon or not source or not attribute:
        raise Refusal(
            f"--task {name}: unknown; built in: {', '.join(BUILT_IN)}; your own: FILE.py:CLASS or PACKAGE.MODULE:CLASS"
        )
    module = _import_file(name, Path(source)) if source.endswith(".py") else _import_module(name, source)
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        what = "does not exist" if found is None else "is not a subclass of evenkeel.tasks.Task"
        raise Refusal(f"--task {name}: {attribute} {what} in {source}")
    if missing := sorted(found.__abstractmethods__):
        raise Refusal(f"--task {name}: {attribute} lacks {', '.join(missing)}; every task defines them")
    return found


def _import_file(name: str, path: Path) -> Any:
    """Import a file under its own stem, so that loader processes can find its classes by name."""
    path = _as_submitted(path)
    if not path.is_file():
        raise Refusal(f"--task {name}: no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    known = sys.modules.get(path.stem)
    if spec is None or spec.loader is None or (known and getattr(known, "__file__", None) != spec.origin):
        raise Refusal(f"--task {name}: the module name '{path.stem}' is taken or not allowed; rename the file")
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    with _import_errors(name):
        spec.loader.exec_module(module)
    return module


def _as_submitted(path: Path) -> Path:
    """The same in the copy of the code that a job in a queue has, whatever has become of the original since."""
    code, origin = os.environ.get("EVENKEEL_CODE"), os.environ.get("EVENKEEL_ORIGIN")
    if not (code and origin):
        return path
    path = path.resolve()
    copy = Path(code) / path.relative_to(origin) if path.is_relative_to(origin) else Path(code, "outside", path.name)
    return copy if copy.exists() else path


def _import_module(name: str, module: str) -> Any:
    if name not in BUILT_IN:
        sys.path.insert(0, str(_as_submitted(Path.cwd())))
    with _import_errors(name):
        return importlib.import_module(module)


class _import_errors:  # noqa: N801  (reads as a statement)
    """Turn whatever a user's module raises into one line that says where."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, (Exception, SystemExit)):
            return
        place = place_of(trace)
        if isinstance(error, SyntaxError) and error.filename:
            place = f" at {error.filename}:{error.lineno}"
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        lines = f"{type(error).__name__}: {reason}".split("\n")
        raise Refusal(f"--task {self.name}: does not import: {lines[0]}{place}") from error

"""A task: data, model, loss and metrics. The one thing a user of the template writes."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor, nn

from ..common.errors import Refusal, seen_at
from ..common.phases import activity
from .checks import checked_losses, one_number, takes
from .early_stopping import ONLY_LOSS
from .task_data import TaskData
from .task_training import TaskTraining

Losses: TypeAlias = Tensor | tuple[Tensor, Mapping[str, Tensor | float]]
"""The result of a task's loss: the loss, or the loss and its parts by name."""


class Task(TaskData, TaskTraining):
    """Data, model, loss and metrics. The methods run on every rank and need not know about ranks.

    Make a subclass a dataclass, and its fields become command-line options, with their docstrings as help.
    A *batch* is the result of `collate` for a micro-batch, on the device of the model.

    >>> class Line(Task):
    ...     def train_dataset(self): return TensorDataset(torch.rand(64, 1))
    ...     test_dataset = train_dataset
    ...     def model(self): return nn.Linear(1, 1)
    ...     def loss(self, model, batch): return (model(batch[0]) - 2 * batch[0]).square().mean()
    >>> Line.best  # there are no other metrics than the loss
    ('loss', 'min')
    """

    best: ClassVar[tuple[str, Literal["max", "min"]] | None] = ("accuracy", "max")
    """The metric that decides which checkpoint is the best; None: store no best checkpoint."""

    unused_parameters: ClassVar[bool] = False
    """Whether some parameters get no gradient in some steps; DDP then searches for them, which takes time."""

    collectives: ClassVar[bool] = False
    """Whether loss and metrics may call collectives of torch.distributed. Their result then depends on the number of
    ranks, and the job fails if a rank has a micro-batch more than another."""

    harmless: ClassVar[frozenset[str]] = frozenset()
    """Options of the task, as config.toml names them, that may change when a run is continued because they do not
    change the result. `data_dir` always may."""

    earlier: ClassVar[Mapping[str, Any]] = {}
    """Values of newer options in runs that began before the options existed, if not None."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.metrics is Task.metrics and cls.best is Task.best:
            cls.best = ONLY_LOSS
        elif cls.metrics is not Task.metrics and cls.best is ONLY_LOSS:  # of a parent that has no metrics
            cls.best = Task.best

    @abstractmethod
    def model(self) -> nn.Module:
        """The network, on the CPU, with random weights (the generators are seeded). For several networks return an
        `nn.ModuleDict`."""

    def loss(self, model: nn.Module, batch: Any) -> Losses:
        """Mean loss over a batch, a scalar with a gradient; of several losses the sum. To log parts of it, or other
        means over samples, return (loss, {"kl": ...}). With a parameter `step=0` it gets the step's number. Default:
        computed by `embed` and `batch_loss`, which a task may define instead."""
        return self.batch_loss(self.embed(model, batch))

    def embed(self, model: nn.Module, batch: Any) -> Tensor | Mapping[str, Tensor]:
        """The embeddings of a batch, for a loss that is not a mean over micro-batches, such as a contrastive loss: a
        tensor of shape [samples, ...] or a dict of such tensors. Called twice for each batch."""
        raise NotImplementedError

    def batch_loss(self, embeddings: Any) -> Losses:
        """The loss of a step, in float32, from the embeddings of all its samples, in order. Returns the same as `loss`,
        may have a parameter `step=0` too, and may draw random numbers."""
        raise NotImplementedError

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Values for each sample, as tensors of shape [samples, ...], or scalars, their mean; default: the loss, with
        `batch_loss` over each --batch-size test samples in their order.

        `summarize` gets their means over all samples. Runs without gradients, with the model in evaluation mode; also
        once on test data before the first step.
        """
        with seen_at(self.loss):
            last = {"step": max(0, activity.step - 1)} if takes(self.loss, "step") else {}
            loss, parts = checked_losses(self.loss(model, batch, **last), trains=False)
        return {"loss": loss, **parts}

    def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
        """The numbers to report, from the means over all test samples (float64). With a parameter `samples=0` it gets
        the number of samples."""
        return {name: one_number(name, mean) for name, mean in means.items()}

    def tokens(self, batch: Any) -> int:
        """Tokens in a batch, for tokens/s; 0: tokens are not counted. Called for one batch, which counts as typical."""
        return 0

    def show(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Values to log for the first batch of each evaluation, as for `Run.log`: {"samples": picture}. On rank 0 only
        (--shard on: all, for its forward pass), in evaluation mode without gradients; default: nothing."""
        return {}

    def after_evaluation(self, metrics: Mapping[str, float], step: int) -> None:
        """Called on all ranks after each evaluation, with the same metrics by full names; possibly twice for a step at
        which the run was stopped. For notifications only: it must not change the training."""

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The columns that `evenkeel predict` writes, by name: tensors of shape [samples] or [samples, numbers].

        "probabilities", [samples, classes], becomes the most likely class and its probability. For image files the
        target is the placeholder of `read_image`, and is not written.
        """
        raise Refusal(
            f"the task {type(self).__name__} has no predict(model, batch): define it and return the columns of the "
            'table, such as {"output": model(batch[0])}, or for classes {"probabilities": model(batch[0]).softmax(1)}'
        )

    def generate(self, model: nn.Module, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """The text by which `evenkeel sample` continues a prompt, from its options. In evaluation mode, without
        gradients; the draws must come from the seed."""
        raise Refusal(
            f"the task {type(self).__name__} generates no text: define generate(model, prompt, tokens, temperature, "
            "top_k, seed), or name a run of --task lm"
        )

    def resolved(self, recorded: Mapping[str, Any] | None) -> Task:
        """The task with values for its open options, such as "auto"; by default the task itself.

        Args:
            recorded: all options of the run to continue; None for a new run.
        """
        return self

    def options(self) -> dict[str, Any]:
        """The fields of a task that is a dataclass, by option name, except secrets."""
        values: dict[str, Any] = dataclasses.asdict(self) if dataclasses.is_dataclass(self) else {}
        fields = getattr(self, "__dataclass_fields__", {})
        return {option_name(name): it for name, it in values.items() if not fields[name].metadata.get("secret")}


def secret() -> Any:
    """The field of an option that is never saved, compared, sent or shown.

    >>> @dataclass
    ... class Private(Classification):
    ...     token: str = secret()
    """
    return dataclasses.field(default="", repr=False, metadata={"secret": True})


def constants(module: nn.Module) -> dict[str, Tensor]:
    """A network's parameters by name, detached, so that a loss computed through it does not train it.

    For `torch.func.functional_call(network, constants(network), inputs)` in the loss of another network.

    >>> {name: tensor.requires_grad for name, tensor in constants(nn.Linear(2, 1)).items()}
    {'weight': False, 'bias': False}
    """
    detached: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    # a parameter with two names stays one tensor, as `functional_call` requires
    for prefix, part in module.named_modules(remove_duplicate=False):
        # --strategy dp gives the loss a replica, whose `_parameters` is empty
        for name, parameter in getattr(part, "_former_parameters", part._parameters).items():
            if parameter is not None:
                constant = detached.setdefault(id(parameter), parameter.detach())
                found[f"{prefix}.{name}" if prefix else name] = constant
    return found


def defines(task: type[Task], method: str) -> bool:
    """Whether a task's class has its own method in place of :class:`Task`'s."""
    return getattr(task, method) is not getattr(Task, method)


def option_name(field: str) -> str:
    """The option of a field. A field with the name of a method ends in an underscore; the option does not."""
    return field.rstrip("_")

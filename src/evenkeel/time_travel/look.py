"""What there is to see in a step: the loss of each sample, norms by layer, the largest activations, a culprit."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import Ended
from ..data.data_digest import TRAINING
from ..data.randomness import derive, generators_kept, seed_computation
from ..data.sampler import Step
from ..run.run import Run
from ..training.state_dicts import local_rows
from ..training.whole_batch import has_batch_loss
from .culprit import Culprit, Finder, watched_modules
from .names import source_of
from .save import save_sample

NORMS = nn.modules.batchnorm._NormBase


class Look:
    """Looks into one step of a run, between its backward pass and its commit; changes nothing of the run.

    Args:
        run: at this step.
        step: the step.
        samples: the numbers of its samples, by micro-batch of this rank.
    """

    def __init__(self, run: Run, step: Step, samples: list[list[int]]) -> None:
        self.run, self.step, self.samples = run, step, samples
        self.batches: list[Any] = []
        self.facts: dict[str, Any] = {"step": step.number + 1, "nonfinite": None, "note": ""}
        self._largest: dict[str, float] = {}
        self._weights: dict[str, Tensor] = {}

    def take(self, batch: Any) -> None:
        """Copy a micro-batch, which the loss may change."""
        self.batches.append(copy.deepcopy(batch))

    def before_commit(self, model: Any, norm: Tensor) -> None:
        """Look at gradients and samples.

        Args:
            model: the run's `DistributedLoss`.
            norm: of the whole gradient.
        """
        named = dict(self.run.state.model.named_parameters())
        self._weights = {name: p.detach().clone() for name, p in named.items()}
        norms = {name: _norm(p.grad) for name, p in named.items() if p.grad is not None}
        self.facts |= {"loss": model.loss.item(), "norm": norm.item()}
        self.facts["layers"] = [
            {"name": name, "gradient": norms.get(name), "weights": _norm(p), "update": None}
            for name, p in named.items()
        ]
        whole = has_batch_loss(self.run.task)
        finite = math.isfinite(self.facts["loss"]) and math.isfinite(self.facts["norm"])
        buffers = {name: it.detach().clone() for name, it in self.run.state.model.named_buffers()}
        with generators_kept():
            losses = {} if whole else self._losses(model)
            for number in range(0 if whole else len(self.batches)):
                self._examine(model, number, look_for=not finite)
            self._restore(buffers)
        if whole:
            self.facts["note"] = "the loss is one of the whole batch, so a sample has none of its own"
        dataset = self.run.attempt.sets[TRAINING]
        rows = [
            {"sample": sample, "source": source_of(dataset, sample), "loss": losses.get((part, row))}
            for part, numbers in enumerate(self.samples)
            for row, sample in enumerate(numbers)
        ]
        self.facts |= {"samples": rows, "activations": self._largest}

    def after_commit(self) -> None:
        """Look at the update."""
        named = dict(self.run.state.model.named_parameters())
        for layer in self.facts["layers"]:
            layer["update"] = _norm(named[layer["name"]].detach() - self._weights[layer["name"]])

    def _losses(self, model: Any) -> dict[tuple[int, int], float]:
        """The loss of each sample alone, by micro-batch and row, from the weights before the step."""
        layers = [it for it in self.run.state.model.modules() if isinstance(it, NORMS) and it.training]
        found: dict[tuple[int, int], float] = {}
        for layer in layers:
            layer.eval()
        try:
            for part, batch in enumerate(self.batches):
                for row in range(len(self.samples[part])):
                    self._seed(part)
                    single = row_of(batch, row, len(self.samples[part]))
                    found[part, row] = _scalar(model.module(single)).item()
        except Exception as error:
            self.facts["note"] = f"this loss is not defined for one sample ({type(error).__name__}: {error})"[:200]
            return {}
        finally:
            for layer in layers:
                layer.train()
        if layers:
            self.facts["note"] = "losses of samples use BatchNorm's running statistics, not the batch's"
        return found

    def _examine(self, model: Any, part: int, look_for: bool) -> None:
        """Compute a micro-batch once more, with its random numbers."""

        def after(name: str, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                value = output.detach().abs().max().item()
                before = self._largest.get(name or "(the model)", 0.0)
                self._largest[name or "(the model)"] = max(before, value) if value == value else value

        parameters = [p for p in self.run.state.model.parameters() if p.requires_grad]
        files = [found] if (found := inspect.getsourcefile(type(self.run.task))) else []
        size = len(self.samples[part])
        with watched_modules(self.run.state.model, after) as computing:
            self._seed(part)
            batch = copy.deepcopy(self.batches[part])
            if not look_for:
                model.module(batch)
                return
            with Finder(size, files, computing) as finder:
                loss = _scalar(model.module(batch))
                torch.autograd.grad(loss, parameters, allow_unused=True)
        if finder.found and not self.facts["nonfinite"]:
            self.facts["nonfinite"] = self._told(finder.found, part)

    def save(self, folder: Path) -> None:
        """Write the samples, as the model gets them, into a folder."""
        for part, numbers in enumerate(self.samples):
            for row, sample in enumerate(numbers):
                try:
                    single = row_of(self.batches[part], row, len(numbers))
                except TypeError as error:
                    raise Ended(f"--save-samples: a sample cannot be taken out of its batch: {error}") from None
                save_sample(folder, self.step.number + 1, sample, single)

    def _told(self, found: Culprit, part: int) -> dict[str, Any]:
        numbers, dataset = self.samples[part], self.run.attempt.sets[TRAINING]
        bad = [numbers[row] for row in found.rows if row < len(numbers)]
        named = [{"sample": number, "source": source_of(dataset, number)} for number in bad]
        return asdict(found) | {"samples": named}

    def _restore(self, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.run.state.model.named_buffers():
                with suppress(RuntimeError):
                    buffer.copy_(buffers[name])

    def _seed(self, part: int) -> None:
        number = self.step.micro_batches[part].id
        seed_computation(derive(self.run.config.seed, "micro-batch", self.step.number, number), self.run.world.devices)


def merged(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of all ranks as one, samples and activations with the largest first; norms are the same on all."""
    first = dict(everyone[0])
    for name in ("nonfinite", "note"):
        first[name] = next((it[name] for it in everyone if it[name]), first[name])
    first["samples"] = sorted((row for it in everyone for row in it["samples"]), key=lambda row: _largest(row["loss"]))
    known, loss = [row["loss"] for row in first["samples"] if row["loss"] is not None], first["loss"]
    mean = sum(known) / max(1, len(known))
    if known and not first["note"] and abs(mean - loss) > 1e-3 * max(abs(loss), abs(mean)):
        first["note"] = (
            f"the losses of single samples have the mean {mean:.4g}, the batch's loss is {loss:.4g}: the loss is "
            "no plain mean, or draws random numbers (dropout)"
        )
    pairs = sorted((pair for it in everyone for pair in it["activations"].items()), key=lambda pair: _largest(pair[1]))
    largest: dict[str, float] = {}
    for name, value in pairs:
        largest.setdefault(name, value)
    first["activations"] = [{"module": name, "largest": value} for name, value in [*largest.items()][:10]]
    return first


def row_of(batch: Any, row: int, size: int) -> Any:
    """A batch of one sample out of a batch of tensors, dicts, lists and tuples; raises a TypeError for others."""
    if isinstance(batch, Tensor):
        if not batch.dim() or len(batch) != size:
            raise TypeError(f"a tensor of shape {list(batch.shape)} does not have {size} rows")
        return batch[row : row + 1].clone()
    if isinstance(batch, Mapping):
        return {name: row_of(value, row, size) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if batch and all(isinstance(it, str) for it in batch) and len(batch) == size:
            return type(batch)([batch[row]])
        return type(batch)([row_of(value, row, size) for value in batch])
    raise TypeError(f"a batch has a {type(batch).__name__}")


def _norm(tensor: Tensor) -> float:
    """With --shard too, because one process replays such a run: its rows are the whole tensor."""
    (whole,) = local_rows([tensor.detach()])
    return float(whole.norm())


def _scalar(found: Any) -> Tensor:
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss


def _largest(value: float | None) -> tuple[bool, float]:
    """Sorts NaN before the largest, and what is not known to the end."""
    return value is None, -math.inf if value is None or value != value else -value

"""The task alone, as on one rank: its data read twice, its loss and metrics computed whole and in parts.

`python -m evenkeel.cli.check.probe OUTPUT OPTIONS` with RANK set; writes its findings as JSON. Rank 0 also computes,
the others only read. There is no process group. Exit code 2: the options or the data are refused.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ...common.errors import Refusal, seen_at
from ...common.naming import TRAIN
from ...common.user_code import no_broadcast
from ...config import Config, validate
from ...data.batch import to_device
from ...data.data_digest import TRAINING
from ...data.dataset import Collated, SizedDataset
from ...data.loader import Seeded
from ...data.order import positions_in, token_batches
from ...data.plan import MicroBatch, Plan
from ...data.randomness import seed_computation, seed_task
from ...data.sampler import Indices
from ...distributed.causes import reason_of
from ...distributed.exits import exit_code
from ...run.build import build_model
from ...tasks.command_line import parse
from ...training.classification import Classification
from ...training.cut import has_batchnorm, single
from ...training.evaluation import _of_each, tensors_restored
from ...training.loss import ModelWithLoss
from ...training.prediction import rows_of
from ...training.state_dicts import sha256
from ...training.task import Task
from ...training.task_data import evaluation_sets, training_set
from ...training.whole_batch import has_batch_loss
from .observed import exact
from .rows import BY_RANK, CHANGED, CLOCK, OWN_DICE, SUM, blame

MOST, SECONDS = 48, 8.0
"""Samples of each set that are read twice, and the maximum seconds for that."""
BATCH = 12
"""Samples of which the loss is computed whole and in three parts."""
PARTS = (6, 4, 2)
TOLERANCE = 1e-4

Found = dict[str, Any]


def main() -> int:
    """Probe, and write OUTPUT."""
    output, *options = sys.argv[1:]
    config, task = parse(options)
    if config.micro_batch == "auto":
        raise Refusal("--micro-batch auto: check compares numbers of ranks at one cut; give a number, or leave it out")
    sets = {TRAINING: training_set(task, config)} | evaluation_sets(task, config)
    validate(config, positions_in(sets[TRAINING]))
    again = {TRAINING: training_set(task, config)} | evaluation_sets(task, config)
    found = facts(config, task, sets)
    found["sets"] = {name: read(config, task, name, sets[name], again[name]) for name in sets}
    if os.environ["RANK"] == "0":
        found |= {"lines": lines(task, sets)} | computed(config, task, sets)
    Path(output).write_text(json.dumps(found))
    return 0


def facts(config: Config, task: Task, sets: Mapping[str, SizedDataset]) -> Found:
    """Facts that the jobs need: the cut, and the steps of an epoch."""
    samples, batches = positions_in(sets[TRAINING]), token_batches(sets[TRAINING])
    model = built(config, task)
    cuts = range(min(6, config.batch_size), 0, -1)
    plans = {cut: Plan.of(replace(config, micro_batches=cut), samples, batches) for cut in cuts}
    fits = [cut for cut, plan in plans.items() if not has_batchnorm(model) or single(plan) is None]
    cut = config.micro_batch or config.micro_batches or next(iter(fits), 1)
    names = ("strategy", "sync_batchnorm", "batch_size", "precision", "share_gpu")
    return {name: getattr(config, name) for name in names} | {
        "gpus": torch.cuda.device_count(), "cut": cut, "typed": bool(config.micro_batch or config.micro_batches),
        "steps": plans[1].steps_per_epoch, "samples": samples, "weights": sha256(model.state_dict()),
    }  # fmt: skip


def built(config: Config, task: Task) -> nn.Module:
    """The model with its first weights."""
    model = build_model(config, task)
    seed_task(config.seed, "loss")  # before any random draw
    return model


class Loader:
    """Batches of samples by number, as a run would load them. Of a stream only the first, which are read once.

    Attributes:
        size: samples that can be read here.
    """

    def __init__(self, config: Config, dataset: SizedDataset, name: str) -> None:
        self.seeded = Seeded(dataset, config.seed, TRAIN if name == TRAINING else name)
        first = getattr(dataset, "first_samples", None)
        self._first: list[Any] | None = first() if first else None
        self.size = len(dataset) if self._first is None else len(self._first)

    def batch(self, numbers: list[int], start: int | None = None) -> Any:
        """A batch of these samples. ``start``: with the random numbers of the micro-batch that begins there."""
        start = numbers[0] if start is None else start
        if self._first is not None:
            return self.seeded.collated([self._first[number] for number in numbers], 0, start)
        return self.seeded.__getitems__(Indices(numbers, 0, MicroBatch(0, 0, start, len(numbers))))


def read(config: Config, task: Task, name: str, dataset: SizedDataset, anew: SizedDataset) -> Found:
    """Digests of samples of a set by number, and how many differ when they are read again, in reverse order, or from
    the set built again; with the line that is the probable cause."""
    loader, until, samples = Loader(config, dataset, name), time.monotonic() + SECONDS, dict[str, str]()

    def differing(of: Loader, numbers: Iterable[str]) -> int:
        return sum(exact(of.batch([int(it)])) != samples[it] for it in numbers)

    for number in sorted({i * (loader.size - 1) // (MOST - 1) for i in range(MOST)}):
        if time.monotonic() < until:
            samples[str(number)] = exact(loader.batch([number]))
    found: Found = {"length": loader.size, "samples": samples, "how": "between two reads"}
    found["differing"] = differing(Loader(config, dataset, name), reversed(samples))
    method = task.train_dataset if name == TRAINING else task.test_dataset
    suspects = [*readers(dataset), method, module_of(task)]
    if not found["differing"]:
        suspects, found["how"] = [method, *readers(dataset)], f"when {method.__name__}() is called again"
        few, again = list(samples)[:: max(1, len(samples) // 8)], Loader(config, anew, name)
        found["differing"] = abs(again.size - loader.size) or differing(again, few)
    return found | {"line": blame(suspects, OWN_DICE, CLOCK, CHANGED) if found["differing"] else ""}


def readers(dataset: Any) -> list[Any]:
    """The methods that read samples, of a data set and of those inside it."""
    found: list[Any] = []
    inner = dataset
    while inner is not None and len(found) < 20:
        names = ("__getitem__", "__getitems__", "__iter__", "iter")
        found += [inner.collate] if isinstance(inner, Collated) else []
        found += [method for name in names if (method := getattr(type(inner), name, None))]
        inner = getattr(inner, "dataset", None)
    return found


def module_of(task: Task) -> Any:
    """The task's file."""
    return sys.modules[type(task).__module__]


def lines(task: Task, sets: Mapping[str, SizedDataset]) -> Found:
    """The lines of a task that are the probable causes, by what is wrong."""
    data = [task.train_dataset, task.test_dataset, *readers(sets[TRAINING])]
    computing = [task.loss, *methods(task)]
    return {
        "rank": blame([*data, module_of(task)], BY_RANK),
        "loss": blame([task.loss, module_of(task)], SUM),
        "state": blame([*computing, module_of(task)], OWN_DICE, CHANGED),
        "kill": blame([*computing, module_of(task)], CHANGED, OWN_DICE),
        "metrics": blame([task.metrics]),
    }


def methods(task: Task) -> Iterator[Any]:
    """The methods that compute: of a task's class and its parents, and of the networks that its file defines."""
    beside = (it for it in vars(module_of(task)).values() if isinstance(it, type) and issubclass(it, nn.Module))
    for kind in [*type(task).__mro__, *beside]:
        if issubclass(kind, (Task, nn.Module)):
            computing = {name: it for name, it in vars(kind).items() if not re.search("__init__|^model$|dataset", name)}
            yield from filter(callable, computing.values())


def computed(config: Config, task: Task, sets: Mapping[str, SizedDataset]) -> Found:
    """The weights, the loss and the metrics: twice, whole and in parts; or a reason why they cannot be checked."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = built(config, task)
    weights = sha256(model.state_dict()), sha256(built(config, task).state_dict())
    found: Found = {"rebuilt": weights[0] == weights[1]}
    model = model.to(device)
    tests = [(name, it) for name, it in sets.items() if name != TRAINING]
    loss = ModelWithLoss(model, task.loss, collectives=task.collectives)

    def value(batch: Any) -> dict[str, Tensor]:
        returned = loss(batch)
        return {"loss": returned[0] if isinstance(returned, tuple) else returned}

    def metrics(batch: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(task.metrics(model, batch))

    found["metrics"] = {"why": "the task has no test data"}
    of_test = [("metrics", metrics, it, name) for name, it in tests[:1]]
    for key, compute, dataset, of in [("loss", value, sets[TRAINING], TRAINING), *of_test]:
        try:
            with no_broadcast():
                found[key] = Parts(config, compute, model, dataset, of, device).compare(training=key == "loss")
        except Exception as error:
            found[key] = {"why": reason_of(error)}
        if task.collectives:
            found[key] = {"why": "the task calls collectives"}
    if has_batch_loss(task):
        found["loss"] |= {"why": "batch_loss() is of a whole step", "off": 0.0}
    if tests and type(task).predict not in (Task.predict, Classification.predict):
        batch, samples = Parts(config, metrics, model, tests[0][1], tests[0][0], device).batch([0])
        try:
            with torch.no_grad(), mode(model, training=False, calm=True), seen_at(task.predict):
                rows_of(task.predict(model, batch), samples)
        except Exception as error:
            found["predict"] = reason_of(error)
    with suppress(KeyError):
        if (of := found["metrics"].get("name")) and not (of == "loss" and type(task).metrics is Task.metrics):
            found["metrics"]["line"] = blame([task.metrics, module_of(task)], rf"[\"']{of}[\"']")
    return found


class Parts:
    """A function of a batch that should give the same twice, and the mean of its values on the batch's parts."""

    def __init__(
        self, config: Config, compute: Callable[[Any], dict[str, Tensor]], model: nn.Module, dataset: SizedDataset,
        name: str, device: torch.device,
    ) -> None:  # fmt: skip
        self.compute, self.model, self.name, self.device = compute, model, name, device
        self._loader = Loader(config, dataset, name)
        self.size = min(BATCH, self._loader.size)

    def compare(self, training: bool) -> Found:
        """Findings: "repeats", whether two calls agree; "why", a reason not to compare; or "off", the difference."""
        everything = list(range(self.size))
        batch = self.batch(everything)
        with mode(self.model, training=training, calm=False):
            first, _, again = (self.sums(it, 1) for it in (batch, self.batch(everything[::2]), batch))
        found: Found = {"repeats": all(torch.equal(first[it], again[it]) for it in first), "why": "it fails on a part"}
        if self.size < 3:
            return found | {"why": f"the {self.name} data has {self.size} samples"}
        if not found["repeats"]:
            return found | {"why": "it differs between two calls"}
        for calm in (True, False) if training else (False,):
            with mode(self.model, training=calm, calm=True), suppress(RuntimeError, ValueError):
                found |= self.cut(everything)
                if not (found["off"] or found["why"]):
                    break
        if found.get("off") and self._loader.seeded.fetch_all:
            return {"repeats": True, "why": "the data set makes whole micro-batches by itself (__getitems__)"}
        return found

    def cut(self, everything: list[int]) -> Found:
        """Compare the whole with the sum of its parts; returns the difference, or why there is none."""
        whole, other = (self.sums(self.batch(everything), seed) for seed in (1, 2))
        other_dice = exact(self._loader.batch(everything, start=1)) != exact(self._loader.batch(everything))
        if other_dice or any(not torch.equal(whole[name], other[name]) for name in whole):
            return {"why": "it draws random numbers, which are a micro-batch's own", "off": 0.0}
        bounds = [0, PARTS[0] * self.size // BATCH, (PARTS[0] + PARTS[1]) * self.size // BATCH, self.size]
        parts = [everything[a:b] for a, b in pairwise(bounds) if b > a]
        found = [self.sums(self.batch(part), 1) for part in parts]
        for name, expected in whole.items():
            total = torch.stack([part[name] for part in found]).sum(0)
            off = float((total - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
            if not off <= TOLERANCE:
                figures = {"whole": expected.flatten()[0], "parts": total.flatten()[0]}
                means = {which: float(sum_) / self.size for which, sum_ in figures.items()}
                return {"name": name, "why": "", "off": off} | means
        return {"off": 0.0, "why": "", "name": ", ".join(whole)}

    def batch(self, numbers: list[int]) -> tuple[Any, int]:
        """A batch of these samples on the device, and their number."""
        return to_device(self._loader.batch(numbers), self.device), len(numbers)

    def sums(self, batch: tuple[Any, int], seed: int) -> dict[str, Tensor]:
        """Each value of a batch times its samples, if it is their mean, or the sum of its rows."""
        seed_computation(seed, [self.device] if self.device.type == "cuda" else [])
        with tensors_restored(self.model):
            found = _of_each(self.compute(copy.deepcopy(batch[0])), batch[1])  # a loss may modify its batch
        return {name: value.detach().double().sum(0).cpu() for name, value in found.items()}


@contextmanager
def mode(model: nn.Module, training: bool, calm: bool) -> Iterator[None]:
    """A context with the model in training mode or not; ``calm``: without dropout and BatchNorm's own statistics."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    for module in model.modules():
        if calm and isinstance(module, (_BatchNorm, _DropoutNd)):
            module.eval()
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


if __name__ == "__main__":
    sys.exit(exit_code(main))

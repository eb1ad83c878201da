"""The data of a task: its methods, and how a run prepares their data sets, the same on every rank."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from numpy.typing import ArrayLike
from torch import nn
from torch.utils.data import default_collate

from ..common.errors import Refusal, place_of, seen_at
from ..common.naming import TEST, TRAIN, VALIDATION
from ..common.user_code import lacks_return
from ..config import Config
from ..data.data_digest import TRAINING
from ..data.dataset import Collated, Limited, Rows, SizedDataset, chosen_of, length, limited, split
from ..data.order import Ordered, by_tokens, call_seeded, ordered
from ..data.randomness import derive, seed_task
from ..data.streams import numbered

T = TypeVar("T")


class TaskData(ABC):
    """The part of a task that defines the samples."""

    refresh_every: ClassVar[int] = 1
    """Epochs from one call of `refresh` to the next."""

    @abstractmethod
    def train_dataset(self) -> SizedDataset:
        """Any map-style data set, or a stream (docs/streams.md); random augmentation may use torch's, NumPy's or
        Python's generator."""

    def validation_dataset(self) -> SizedDataset | None:
        """The data that decides `best` and --patience; the test data is then used only at the end. None: no data."""
        return None

    def unchanged_train_dataset(self) -> SizedDataset:
        """The training data without augmentation, from which --validation takes a share; default: `train_dataset`."""
        return self.train_dataset()

    def sample_weights(self) -> ArrayLike | None:
        """A nonnegative weight for each sample of `train_dataset`. An epoch draws as many samples as there are, with
        replacement, in proportion. None: each sample is used once. See `evenkeel.tasks.balanced`."""
        return None

    def order(self, epoch: int) -> ArrayLike | None:
        """The sample indices of an epoch in order, equally many in each epoch: a curriculum, or
        `evenkeel.tasks.buckets`. A function of the epoch, and of the generators, which are seeded for it. None: the
        usual order."""
        return None

    def sample_lengths(self) -> ArrayLike | None:
        """The tokens of each sample of `train_dataset`, for --batch-tokens, and called only with it."""
        return None

    def refresh(self, model: nn.Module, epoch: int) -> SizedDataset | None:
        """Training data made by the model, such as pseudo-labels, for the epoch that begins: as many samples as
        `train_dataset` has, on the CPU. None: the data of `train_dataset`.

        Called on all ranks with a copy of the model, in evaluation mode without gradients; again at a resume in
        mid-epoch, with the weights, and the task's state, of the epoch's first step. So make it from these, the epoch
        and the generators, which are seeded for it, and change nothing.
        """
        return None

    @abstractmethod
    def test_dataset(self) -> SizedDataset | dict[str, SizedDataset] | None:
        """The data of the evaluation; or several sets by name. Without validation data the first one decides.
        None: no test data, and without validation data no evaluation."""

    def collate(self, samples: list[Any]) -> Any:
        """The batch of a micro-batch's samples, as `DataLoader(collate_fn=...)`: any structure, also nested tensors and
        objects with `to(device)`. Default: `default_collate`. The generators are seeded by epoch and micro-batch."""
        return default_collate(samples)

    def read_image(self, path: Path) -> Any:
        """A sample like those of the test data from an image file, with any target, for `evenkeel predict --input`."""
        raise Refusal(
            f"--input: the task {type(self).__name__} has no read_image(path): define it and return a sample like "
            "those of the test data, or use --set"
        )

    def class_names(self) -> Sequence[str] | None:
        """The names of the classes, in the order of their numbers, for output; None: numbers are shown."""
        return None


def training_set(task: TaskData, config: Config, unchanged: bool = False) -> SizedDataset:
    """A task's training data in its order, the same on every rank and at every start, shortened by --limit-batches.

    ``unchanged``: without augmentation, and in the usual order. A stream gets numbered samples (`streams`).
    """
    seed_task(config.seed, "data")
    whole = numbered(_data_of(task.unchanged_train_dataset if unchanged else task.train_dataset), config, unchanged)
    with seen_at(task.train_dataset):
        part = _trained_on(whole, config)
    dataset = collated(task, part)
    if unchanged:
        return dataset
    chosen, size = chosen_of(whole, part), length(whole, "train_dataset")
    found: SizedDataset = ordered(dataset, size, chosen, task.sample_weights, task.order, config.seed)
    if config.batch_tokens:
        cut = {"tokens": config.batch_tokens, "samples": config.batch_size, "parts": config.micro_batches}
        lengths = call_seeded(task.sample_lengths, config.seed)
        return by_tokens(found, lengths, size, chosen, seed=config.seed, **cut)
    return found


def _trained_on(whole: SizedDataset, config: Config) -> SizedDataset:
    """The samples that --validation and --limit-batches leave of the training data."""
    part = split(whole, config.validation, derive(config.seed, VALIDATION))[0] if config.validation else whole
    return limited(part, config.limit_batches * config.batch_size)


def refreshed_set(task: TaskData, config: Config, made: Any, train_set: Any) -> SizedDataset:
    """The result of `refresh`, with the same part of its samples, in the same order, as the training data.

    Raises:
        Refusal: it has another number of samples, or its tensors are on a GPU.
    """
    if (found := length(made, "refresh")) != len(whole := _whole(train_set)):
        raise Refusal(
            f"refresh() returned {found} samples and train_dataset() has {len(whole)}: all epochs of a run have one "
            "length; repeat or leave out samples, with torch's Subset for example"
        )
    if (rows := Rows.of(made)) and (device := rows.tensors[0].device).type != "cpu":
        raise Refusal(f"refresh() returned tensors on {device}: return them on the CPU, where data is loaded")
    dataset = collated(task, _trained_on(made, config))
    return Ordered(dataset, train_set.order) if isinstance(train_set, Ordered) else dataset


def _whole(part: Any) -> Any:
    """What a task's method returned, of a set that was made from it."""
    while isinstance(part, (Ordered, Collated, Limited)):
        part = part.dataset
    return part


def refuse_overlap(train_set: SizedDataset, validation: SizedDataset) -> None:
    """Refuse to take --validation from other samples than the training data: it could have some of these."""
    if (trained := len(_whole(train_set))) != (unchanged := len(_whole(validation))):
        raise Refusal(
            f"--validation: train_dataset() has {trained} samples and unchanged_train_dataset() {unchanged}, so a part "
            "of one might be in the other; return the same samples in the same order, or define validation_dataset()"
        )


def has_own_collate(task: TaskData) -> bool:
    """Whether a task has a collate function of its own, in its class or as an attribute."""
    return getattr(task.collate, "__func__", None) is not TaskData.collate


def collated(task: TaskData, dataset: SizedDataset) -> SizedDataset:
    """The data set with the task's own collate function, if it has one."""
    return Collated(dataset, task.collate) if has_own_collate(task) else dataset


def _data_of(method: Callable[[], T]) -> T:
    """The result of one of a task's data methods.

    Raises:
        Refusal: a file or folder is missing. It names the path and the line in the task. Other errors are mistakes in
            the code and keep their traceback.
    """
    try:
        return method()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        why = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        raise Refusal(
            f"{method.__name__}(): {why}{place_of(error.__traceback__)}; put the data there, or correct the path"
        ) from error


def evaluation_sets(task: TaskData, config: Config) -> dict[str, SizedDataset]:
    """The sets that a task is evaluated on, by name, also the same on every rank; there may be none. The first one
    decides which checkpoint is the best.

    Raises:
        Refusal: a set is empty or not map-style, or its name cannot be part of a metric's and a file's name.
    """
    seed_task(config.seed, "data")
    validation = _data_of(task.validation_dataset)
    if config.validation:
        if validation is not None:
            raise Refusal(f"--validation {config.validation:g}: the task has its own validation set; leave it out")
        seed_task(config.seed, "data")
        whole = _data_of(task.unchanged_train_dataset)
        _, validation = split(whole, config.validation, derive(config.seed, VALIDATION))
    seed_task(config.seed, "data")
    test = _data_of(task.test_dataset)
    if test is None and lacks_return(task.test_dataset):
        with seen_at(task.test_dataset):
            raise Refusal("test_dataset() has no return: return the data, or None for a run without an evaluation")
    several = isinstance(test, dict) and bool(test) and not all(type(key) is int for key in test)
    sets: dict[Any, Any] = {} if validation is None else {VALIDATION: validation}
    tests = test if several else {} if test is None else {TEST: test}
    for name, dataset in tests.items():  # type: ignore[union-attr]
        fits = type(name) is str and re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)
        if not fits or name in (TRAIN, TRAINING, VALIDATION):
            raise Refusal(
                f"test_dataset() returned a set named {name!r}: a name has letters, digits, _, . and -, and must not "
                f"be {TRAIN}, {TRAINING} or {VALIDATION}; rename it"
            )
        sets[name] = dataset
    for name, dataset in sets.items():
        method = "validation_dataset" if name == VALIDATION else "test_dataset"
        with seen_at(getattr(task, method)):
            sets[name] = collated(task, limited(dataset, config.limit_batches * config.batch_size, method))
            if not len(sets[name]):
                raise Refusal(f"--task {config.task}: its {name} data is empty")
    return sets

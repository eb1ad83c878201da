"""The sets that a run is evaluated on: by name, and split from the training data without an overlap."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.common.errors import Refusal
from evenkeel.config import Config
from evenkeel.tasks.classify import Classify
from evenkeel.training.task_data import evaluation_sets, training_set
from tests.support.components import optional
from tests.support.raised import refusal_of
from tests.support.validated_task import Validated, samples

OTHERS = [task() for name in ("regress.Regress", "segment.Segment") for task in optional(f"tasks.{name}")]


class OfLength:
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length()  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> Any:
        return index


def numbers(dataset: Any) -> list[int]:
    return [int(dataset[i][-1]) for i in range(len(dataset))]


def test_a_random_split_in_two_methods_has_no_sample_twice_and_follows_the_seed() -> None:
    train, sets = training_set(Validated(), Config()), evaluation_sets(Validated(), Config())
    assert list(sets) == ["validation", "clean", "noisy"]
    assert sorted(numbers(train) + numbers(sets["validation"])) == list(range(1, 72))
    assert numbers(evaluation_sets(Validated(), Config(seed=1))["validation"]) != numbers(sets["validation"])
    # the control: without the seed the two methods draw another split each
    assert set(numbers(Validated().train_dataset())) & set(numbers(Validated().validation_dataset()))


@pytest.mark.parametrize("name", ["train", "training", "validation", "a/b", "", ".hidden", "../up", 'x"', 1.5])
def test_names_of_sets_that_are_refused(name: Any) -> None:
    class Named(Validated):
        def test_dataset(self) -> Any:
            return {"good": samples(3, 0), name: samples(3, 0)}

    with pytest.raises(Refusal, match="test_dataset\\(\\) returned a set named"):
        evaluation_sets(Named(), Config())


def test_a_second_validation_set_is_refused() -> None:
    with pytest.raises(Refusal, match="--validation 0\\.1: the task has its own validation set; leave it out"):
        evaluation_sets(Validated(), Config(validation=0.1))


def test_sets_that_are_empty_or_no_data_are_refused_by_name() -> None:
    class Empty(Validated):
        def test_dataset(self) -> Any:
            return {"clean": samples(3, 0), "none": []}

    with pytest.raises(Refusal, match="--task classify: its none data is empty"):
        evaluation_sets(Empty(), Config())
    Empty.validation_dataset = lambda _self: iter(())  # type: ignore[method-assign]
    with pytest.raises(Refusal, match="validation_dataset\\(\\) returned"):
        evaluation_sets(Empty(), Config())


def test_a_dict_by_number_is_a_data_set_as_it_was() -> None:
    class Numbered(Validated):
        validate = False

        def test_dataset(self) -> Any:
            return dict(enumerate(samples(3, 0)))

    found = evaluation_sets(Numbered(validate=False), Config())
    assert {name: len(data) for name, data in found.items()} == {"test": 3}


@pytest.mark.parametrize(
    ("length", "why"),
    [
        (lambda: -3, "ValueError: __len__() should return >= 0; it must"),
        (lambda: 3.5, "TypeError: 'float' object cannot be interpreted as an integer; it must"),
        (lambda: 10**30, "OverflowError: cannot fit 'int' into an index-sized integer; it must"),
        (lambda: [][0], f"IndexError: list index out of range at {__file__}:"),
    ],
)
@pytest.mark.parametrize("method", ["train_dataset", "validation_dataset", "test_dataset"])
def test_a_length_that_is_none_is_refused_in_a_line(length: Any, why: str, method: str) -> None:
    told = f"{method}() returned an OfLength whose __len__ fails: {why}"
    assert refused(method, lambda: OfLength(length)).startswith(told)


@pytest.mark.parametrize(
    ("reads", "why"),
    [
        (lambda: Path("no/such.csv").read_text(), "No such file or directory: no/such.csv"),
        (lambda: Path(__file__, "x").read_text(), f"Not a directory: {__file__}/x"),
        (lambda: list(os.scandir("/no/such/folder")), "No such file or directory: /no/such/folder"),
        (lambda: exec("raise FileNotFoundError('run prepare.py first')"), "run prepare.py first"),
    ],
)
@pytest.mark.parametrize("method", ["train_dataset", "validation_dataset", "test_dataset"])
def test_a_file_that_a_task_does_not_find_is_a_line_with_its_place(reads: Any, why: str, method: str) -> None:
    assert refused(method, reads).startswith(f"{method}(): {why} at ")
    assert f"{__file__}:" in refused(method, reads) or "<string>" in refused(method, reads)


def test_a_mistake_in_a_task_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        refused("train_dataset", lambda: {}["data"])


def refused(method: str, makes: Any) -> str:
    class Odd(Validated):
        def __getattribute__(self, name: str) -> Any:
            return returned if name == method else super().__getattribute__(name)

    def returned() -> Any:
        return makes()

    returned.__name__ = method
    return refusal_of(training_set if method == "train_dataset" else evaluation_sets, Odd(), Config())


@pytest.mark.parametrize("task", [Classify(), Classify(augment="basic"), *OTHERS])
def test_the_option_validation_splits_the_training_data_of_any_task_and_leaves_the_test_data(task: Any) -> None:
    config = Config(validation=0.25)
    train, sets, everything = training_set(task, config), evaluation_sets(task, config), training_set(task, Config())
    assert (list(evaluation_sets(task, Config())), list(sets)) == (["test"], ["validation", "test"])
    kept = [part.indices for part in (train, sets["validation"])]  # type: ignore[attr-defined]
    assert sorted(kept[0] + kept[1]) == list(range(len(everything)))
    assert len(kept[1]) == round(len(everything) / 4)
    assert evaluation_sets(task, Config(validation=0.25, seed=1))["validation"].indices != kept[1]  # type: ignore[attr-defined]
    first = sets["validation"][0][0]
    assert torch.equal(first, sets["validation"][0][0]), "without augmentation"

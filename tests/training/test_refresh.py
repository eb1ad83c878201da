"""Data that a model makes: from the weights of the epoch's first step, without a trace, or not at all."""

import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, random_split

from evenkeel.common.errors import EndedHere, Refusal
from evenkeel.config import Config
from evenkeel.data.dataset import InMemory
from evenkeel.data.loader import make_loader
from evenkeel.data.order import balanced, order_of
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import ElasticSampler, by_step
from evenkeel.distributed.world import World
from evenkeel.run.build import build_state
from evenkeel.tasks import Streams, Task
from evenkeel.training.refresh import Refresh, refuse_unrefreshable
from evenkeel.training.state import State
from evenkeel.training.task_data import refreshed_set, training_set
from tests.support.raised import line_of
from tests.support.refreshed_task import Every2, Plain, Refreshed

ALONE = World(0, 0, 1, 1, torch.device("cpu"), launched=False)


class Made(Task):
    """What `make` makes of (features, model, epoch) of a data set of tensors."""

    def __init__(self, make: Any = lambda features, model, epoch: None) -> None:
        self.make = make
        self.features = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))

    def train_dataset(self) -> Any:
        return InMemory(self.features, torch.arange(20))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def refresh(self, model: nn.Module, epoch: int) -> Any:
        return self.make(self.features, model, epoch)


def state_of(task: Task, config: Config = Config()) -> State:  # noqa: B008
    torch.manual_seed(0)
    sets = {"training": training_set(task, config)}
    return build_state(config, task, ALONE, Plan(20, 4, 2, 2), task.model(), sets)


def data_of(task: Task, epoch: int = 1, config: Config = Config()) -> Any:  # noqa: B008
    state = state_of(task, config)
    state.keep_weights(state.refresh, epoch)
    return state.refresh.data(training_set(task, config), state.task_state)


def labels(dataset: Any) -> list[float]:
    return [float(dataset[index][1]) for index in range(len(dataset))]


def test_it_is_made_from_the_weights_and_the_state_at_the_epochs_first_step() -> None:
    """Also by another process, which has later ones."""
    task = Refreshed()
    state, other = state_of(task), state_of(later := Refreshed())
    assert state.refresh
    torch.nn.init.ones_(state.parameters[0])  # other weights than those it begins with
    task.past = [30.0]
    state.task_state.load({"past": [30.0]})
    state.keep_weights(state.refresh, 1)
    made = labels(state.refresh.data(task.train_dataset(), state.task_state))
    torch.nn.init.zeros_(state.parameters[0])
    state.task_state.load({"past": [7.0]})
    other.restore(state.capture())
    assert later.past == [7.0]
    assert labels(other.refresh.data(later.train_dataset(), other.task_state)) == made
    assert later.past == [7.0], "the present one again"
    assert min(made) > 10, "of the state then"
    other.keep_weights(other.refresh, 1)  # the control
    assert labels(other.refresh.data(later.train_dataset(), other.task_state)) != made


class InPlace(Refreshed):
    """Its state is a tensor, which is loaded in place. refresh() saves as a rescue does, and may fail then."""

    fails = False

    def __post_init__(self) -> None:
        self.past = torch.zeros(1)  # type: ignore[assignment]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.as_tensor(self.past).copy_(state["past"])

    def refresh(self, model: nn.Module, epoch: int) -> Any:
        self.seen, self.rescued = float(self.past[-1]), self.state.capture()["task"]
        if self.fails:
            raise ZeroDivisionError
        return super().refresh(model, epoch)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rescue_meanwhile_saves_the_present_state_of_the_task(fails: bool) -> None:
    task = InPlace()
    task.state = state = state_of(task)
    task.fails, own = fails, state.task_state
    own.load({"past": torch.tensor([30.0])})
    state.keep_weights(state.refresh, 1)
    own.load({"past": torch.tensor([7.0])})
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        state.refresh.data(task.train_dataset(), own)
    assert task.seen == 30, "the control: refresh() gets that of the epoch's first step"
    assert float(task.rescued["past"]) == 7
    assert float(task.past[-1]) == float(state.capture()["task"]["past"]) == 7, "and afterwards, also of an error"


def test_it_leaves_no_trace() -> None:
    def make(features: torch.Tensor, model: nn.Module, epoch: int) -> Any:
        assert not model.training
        assert not torch.is_grad_enabled()
        drawn = torch.rand(1).item() + random.random() + np.random.rand()
        model.train()(features).sum()
        model.requires_grad_(True)
        return InMemory(features, torch.full((20,), drawn + epoch))

    state = state_of(task := Made(make))
    state.keep_weights(state.refresh, 2)
    before = (torch.get_rng_state().tolist(), random.getstate(), str(state.capture()))
    made = labels(state.refresh.data(task.train_dataset(), state.task_state))
    assert (torch.get_rng_state().tolist(), random.getstate(), str(state.capture())) == before
    assert labels(state.refresh.data(task.train_dataset(), state.task_state)) == made, "seeded"
    state.keep_weights(state.refresh, 3)
    assert labels(state.refresh.data(task.train_dataset(), state.task_state))[0] != made[0] + 1, "by the epoch"


def change_weights(features: torch.Tensor, model: nn.Module, epoch: int) -> Any:
    nn.init.zeros_(next(model.parameters()))


def change_in_place(features: torch.Tensor, model: nn.Module, epoch: int) -> Any:
    features += 1
    return InMemory(features, torch.arange(20))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (change_weights, "refresh() changed the weights of the model, which a resume needs"),
        (change_in_place, "refresh() changed train_dataset()'s tensors, and a resume would not"),
        (lambda *_: InMemory(torch.zeros(19)), "refresh() returned 19 samples and train_dataset() has 20"),
        (lambda *_: iter(()), "refresh() returned a tuple_iterator, which has no __len__"),
        (lambda *_: InMemory(torch.zeros(20, device="meta")), "refresh() returned tensors on meta: return them on"),
        (lambda *_: torch.distributed.all_reduce(torch.zeros(1)), "refresh() calls all_reduce of torch.distributed"),
    ],
)
def test_what_a_resume_could_not_repeat_ends_the_run_in_a_line(make: Any, line: str) -> None:
    assert line_of(EndedHere, data_of, Made(make)).startswith(line)


def test_a_task_state_that_it_changes_ends_the_run() -> None:
    class Changing(Refreshed):
        def refresh(self, model: nn.Module, epoch: int) -> Any:
            self.past = [5.0]

    assert "the state of Changing has changed outside after_step" in line_of(EndedHere, data_of, Changing())


def test_a_random_split_is_the_same_there() -> None:
    class Split(Made):
        def train_dataset(self) -> Any:
            return random_split(super().train_dataset(), [0.5, 0.5])[0]

        def refresh(self, model: nn.Module, epoch: int) -> Any:
            torch.rand(3)
            return self.train_dataset()

    assert labels(data_of(task := Split())) == labels(training_set(task, Config()))
    assert labels(task.train_dataset()) != labels(task.train_dataset()), "the control: elsewhere it is as drawn"


def test_it_has_the_part_and_the_order_of_the_training_data() -> None:
    class Weighted(Made):
        def sample_weights(self) -> Any:
            return balanced([0] * 5 + [1] * 15)

    config = Config(validation=0.2, batch_size=4, limit_batches=3)
    task = Weighted(lambda features, _model, _epoch: InMemory(features, torch.arange(20) + 100))
    before = training_set(task, config)
    made = refreshed_set(task, config, task.make(task.features, None, 0), before)
    assert labels(made) == [label + 100 for label in labels(before)]
    assert order_of(made) is order_of(before) is not None
    hard = refreshed_set(Made(), Config(), Subset(Made().train_dataset(), [7] * 20), Made().train_dataset())
    assert labels(hard) == [7] * 20


def test_it_is_called_every_so_many_epochs() -> None:
    for task, epochs in ((Refreshed(), [0, 1, 2, 3]), (Every2(), [0, 2])):
        refresh = Refresh.of(task, task.model(), Config(), ALONE)
        assert [epoch for epoch in range(4) if refresh.due(epoch)] == epochs
    assert Refresh.of(Plain(), Plain().model(), Config(), ALONE) is None


def test_what_cannot_be_refreshed_is_refused() -> None:
    class Streamed(Made):
        def train_dataset(self) -> Any:
            return Streams(lambda k, turn: range(100), 2)

    with pytest.raises(Refusal, match="train_dataset\\(\\) returned a stream"):
        refuse_unrefreshable(task := Streamed(), training_set(task, Config(max_steps=2)))
    task.refresh_every = 0  # type: ignore[misc]
    with pytest.raises(Refusal, match="refresh_every is 0: it is a number of epochs"):
        refuse_unrefreshable(task, Made().train_dataset())
    refuse_unrefreshable(Made(), Made().train_dataset())


def test_loader_processes_of_each_epoch_see_its_data(tmp_path: Path) -> None:
    class Reader(list[int]):
        def __getitem__(self, index: Any) -> Any:
            (tmp_path / f"{os.getpid()}").touch()
            return super().__getitem__(index)

    sampler = ElasticSampler(range(8), 4, 2, num_replicas=1, rank=0)
    sampler.epochs = 2
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = make_loader(Reader([epoch] * 8), sampler, "train", 1, ALONE.device, ahead=False)
        found += [batch.tolist() for step in by_step(batches, sampler) for batch in step.batches]
    assert found == [[0, 0]] * 4 + [[1, 1]] * 4
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "they have ended"

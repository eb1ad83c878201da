"""Buffers are copied and compared a group at a time, and exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from evenkeel.data.plan import Plan
from evenkeel.training.buffers import Buffers
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.state import State
from tests.support.small_runs import odd_job, trained
from tests.support.steps import passes
from tests.training.test_gradients import ALONE

GOOD = {torch.device("cpu"): torch.tensor(False)}


class Counted(TorchDispatchMode):
    """Counts operations, each of which is a kernel or more on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def layers(count: int) -> dict[str, Tensor]:
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(count)))
    return dict(model.named_buffers())


def flat_step(live: dict[str, Tensor], buffers: Buffers) -> None:
    changes = torch.cat([change.flatten() for change in buffers.take_changes(0.5)])
    buffers.commit(buffers.new_values(changes), GOOD)


def naive_step(live: dict[str, Tensor], buffers: Buffers) -> None:
    for name, buffer in live.items():
        change = (buffer.double() - buffers.committed[name].double()) * 0.5
        buffer.copy_(buffers.committed[name].double() + change)
        buffers.committed[name].copy_(buffer)


def operations(step: Any, count: int) -> int:
    live = layers(count)
    buffers = Buffers(live)
    with torch.no_grad(), Counted() as counted:
        step(live, buffers)
    return counted.count


def test_more_buffers_are_not_more_operations_and_in_a_loop_they_are() -> None:
    assert operations(flat_step, 2) == operations(flat_step, 50)
    assert operations(naive_step, 50) > 10 * operations(naive_step, 2)


def test_numbers_that_float64_does_not_hold_stay_what_they_are() -> None:
    live = {
        "hash": torch.tensor([2**62 + 1, -(2**62) - 1]),
        "rotation": torch.tensor([1 + 2j, 3 - 4j]),
        "mask": torch.tensor([0.0, float("-inf")]),
        "seen": torch.tensor([True, False]),
        "small": torch.tensor([0, 255], dtype=torch.uint8),
    }
    before = {name: value.clone() for name, value in live.items()}
    flat_step(live, Buffers(live))
    assert all(torch.equal(live[name], before[name]) for name in live)
    # the control: by way of float64
    assert live["hash"].double().long().tolist() != live["hash"].tolist()


def test_views_of_the_committed_values_stay_and_follow() -> None:
    live = layers(2)
    buffers = Buffers(live)
    seen = dict(buffers.committed)
    assert seen.keys() == live.keys()
    with torch.no_grad():
        for buffer in live.values():
            buffer.add_(4)
    changes = torch.cat(buffers.take_changes(0.25))
    assert all(torch.equal(live[name], seen[name]) for name in live), "back where the step began"
    before = {name: value.clone() for name, value in seen.items()}
    buffers.commit(buffers.new_values(changes), GOOD)
    for name, value in live.items():
        assert torch.equal(value, before[name] + 1), name
        assert torch.equal(seen[name], value), name
        assert buffers.committed[name] is seen[name]


def test_a_step_that_is_left_out_changes_nothing() -> None:
    live = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    buffers = Buffers(live)
    buffers.commit([group.committed + 1 for group in buffers.groups], {torch.device("cpu"): torch.tensor(True)})
    assert live["a"].tolist() == [1, 2]
    assert live["b"] == 3


def test_flags_and_small_counts_go_up_and_down() -> None:
    live = {"seen": torch.tensor([True, False]), "small": torch.tensor([5, 250], dtype=torch.uint8)}
    buffers = Buffers(live)
    live["seen"].logical_not_()
    live["small"].copy_(torch.tensor([3, 255], dtype=torch.uint8))
    changes = torch.cat([change.flatten() for change in buffers.take_changes(1.0)])
    buffers.commit(buffers.new_values(changes), GOOD)
    assert live["seen"].tolist() == [False, True]
    assert live["small"].tolist() == [3, 255]


def test_what_begins_infinite_becomes_the_mean_of_the_micro_batches() -> None:
    """As the minimum and the maximum of an observer, for quantisation."""
    live = {"least": torch.tensor([float("inf")] * 2), "most": torch.tensor(-float("inf"), dtype=torch.float16)}
    buffers, changes = Buffers(live), []
    for least, weight in ((1.0, 0.25), (5.0, 0.75)):
        live["least"][0] = least
        live["most"].fill_(2 * least)
        changes.append(torch.cat(buffers.take_changes(weight)))
    buffers.commit(buffers.new_values(changes[0] + changes[1]), GOOD)
    assert live["least"].tolist() == [4, float("inf")]
    assert live["most"] == 8


def enqueue(model: Any, x: Tensor) -> None:
    """As MoCo does."""
    places = (torch.arange(len(x)) + model.kept[-1]) % 4
    model.kept[places] = 1
    model.kept[-1] = (model.kept[-1] + len(x)) % 4


@pytest.mark.parametrize(
    ("start", "change", "micro_batch", "warned"),
    [
        (torch.zeros(5, dtype=torch.int64), enqueue, 2, True),
        (torch.zeros(5, dtype=torch.int64), enqueue, 6, False),
        (torch.zeros(3, dtype=torch.int64), lambda model, x: model.kept[int(x[0, 0]) % 3].add_(1), 2, True),
        (torch.tensor(False), lambda model, x: model.kept.fill_(True), 2, True),
        (torch.tensor(0), lambda model, x: model.kept.add_(1), 2, False),
        (torch.tensor(0.5), lambda model, x: model.kept.mul_(0.9).add_(x.mean()), 2, False),
        (torch.tensor([True, False]), lambda model, x: None, 2, False),
    ],
    ids=["queue", "whole step", "counts", "flag", "steps", "mean", "mask"],
)
def test_saved_integers_that_are_no_statistics_are_named_once(
    start: Tensor, change: Any, micro_batch: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        change(model, x)
        return model(x).mean()  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("kept", start)
    plan = Plan(6, 6, micro_batch, epochs=4)
    learner = DistributedLoss(loss, State(model, []), ALONE, plan)
    for step in range(4):
        passes(learner, step, plan.micro_batches(step), torch.arange(12.0).view(6, 2).split(micro_batch))
        learner.step()
    assert len(caplog.records) == warned
    assert all("change its buffer kept: a step adds the mean of" in it.message for it in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Queue", "BatchNorm"])
def test_a_run_with_a_queue_in_the_model_says_what_becomes_of_it(tmp_path: Path, kind: str) -> None:
    first, other = trained(2, odd_job(kind, tmp_path / "run", "--drop-last"))
    assert first.stderr.count("change its buffer queue_ptr: a step adds the mean of its micro-batches' changes") == (
        kind == "Queue"
    )
    assert "buffer" not in other.stderr

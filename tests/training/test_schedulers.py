"""torch's schedulers as a part of the committed state, beside a bare loop."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as torchs

from evenkeel.common.errors import Ended
from evenkeel.config import Config
from evenkeel.training.nonfinite import Verdict
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.precision import Scaler
from evenkeel.training.schedulers import Schedulers, checked_schedulers
from evenkeel.training.seqlock import Torn
from evenkeel.training.state import State
from tests.support.raised import line_of, refusal_of

STEPS = 20

KINDS: dict[str, Callable[[Optimizer], Any]] = {
    "onecycle": lambda it: torchs.OneCycleLR(it, 0.5, total_steps=STEPS),
    "onecycle, linear": lambda it: torchs.OneCycleLR(it, 0.5, total_steps=STEPS, anneal_strategy="linear"),
    "cosine": lambda it: torchs.CosineAnnealingLR(it, 7),
    "restarts": lambda it: torchs.CosineAnnealingWarmRestarts(it, 3, 2),
    "lambda": lambda it: torchs.LambdaLR(it, lambda step: np.cos(step / 30)),
    "multiplicative": lambda it: torchs.MultiplicativeLR(it, lambda step: np.float32(0.9)),
    "milestones": lambda it: torchs.MultiStepLR(it, [3, 3, 9]),
    "step": lambda it: torchs.StepLR(it, 4),
    "exponential": lambda it: torchs.ExponentialLR(it, 0.9),
    "polynomial": lambda it: torchs.PolynomialLR(it, 11),
    "linear": lambda it: torchs.LinearLR(it, 0.1, total_iters=6),
    "constant": lambda it: torchs.ConstantLR(it, 0.1, total_iters=6),
    "cyclic": lambda it: torchs.CyclicLR(it, 0.01, 0.5, 3, scale_fn=lambda x: 0.9**x, scale_mode="iterations"),
    "triangular": lambda it: torchs.CyclicLR(it, 0.01, 0.5, 3, mode="triangular2"),
    "sequential": lambda it: torchs.SequentialLR(
        it, [torchs.LinearLR(it, 0.1, total_iters=4), torchs.MultiStepLR(it, [2, 5])], [4]
    ),
    "chained": lambda it: torchs.ChainedScheduler(
        [torchs.ConstantLR(it, 0.1, total_iters=4), torchs.ExponentialLR(it, 0.9)], optimizer=it
    ),
    "plateau": lambda it: torchs.ReduceLROnPlateau(it, patience=1, cooldown=1),
}


def optimizer_of(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.2, momentum=0.9)


def new_state(kind: str, skip: bool = True, scaler: Scaler | None = None) -> State:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer, best = optimizer_of(model), ("loss", "min")
    made = checked_schedulers([KINDS[kind](optimizer)], [optimizer], Config(), STEPS, best, own_rates=False)
    schedulers = Schedulers(made, best, STEPS, every=2)
    return State(model, [optimizer], skip_nonfinite=skip, scaler=scaler, schedulers=schedulers)


def gradient(step: int) -> float:
    return math.sin(step)


def metric(step: int) -> float:
    return float(max(3, 9 - step))


def take(state: State, bad: bool = False) -> None:
    """A step as `train.py` does it, and every other time an evaluation."""
    state.clear_gradients()
    for parameter in state.parameters:
        parameter.grad = torch.full_like(parameter, math.nan if bad else gradient(state.step))
    state.set_rates(0.125)  # has no effect
    state.commit(clip_grad_norm(state.parameters, 0.0), loss=torch.tensor(1.0))
    if state.step % 2 == 0:
        state.settle()
        state.record_evaluation({"loss": metric(state.step)})


def steps(state: State, number: int) -> None:
    for _ in range(number):
        take(state)


def bare(kind: str, steps: int = STEPS) -> tuple[list[float], nn.Module]:
    """The rate after each step of a plain loop, and its model."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    scheduler = KINDS[kind](optimizer)
    rates = [scheduler.get_last_lr()[0]]
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient(step))
        optimizer.step()
        if kind == "plateau":
            if (step + 1) % 2 == 0:
                scheduler.step(metric(step + 1))
        else:
            scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates, model


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def last_rate(state: State) -> float:
    rate: float = state.schedulers.made[0].scheduler.get_last_lr()[0]
    assert state.optimizers[0].param_groups[0]["lr"] == rate
    return rate


@pytest.mark.parametrize("kind", KINDS)
def test_rates_and_weights_are_those_of_a_plain_loop_from_any_saved_step(kind: str, tmp_path: Path) -> None:
    expected, model = bare(kind)
    assert len(set(expected)) > 1
    state = new_state(kind)
    rates = [last_rate(state)]
    for step in range(STEPS):
        torch.save(state.capture(), tmp_path / f"{step}.pt")
        take(state)
        assert state.rates["lr"] == expected[step], "what the step was made with"
        rates.append(last_rate(state))
    assert rates == expected
    assert same_weights(state.model, model)
    for step in (0, 1, 2, 5, 13):
        state = new_state(kind)
        state.restore(torch.load(tmp_path / f"{step}.pt", weights_only=True))
        assert last_rate(state) == expected[step]
        while state.step < STEPS:
            take(state)
            assert last_rate(state) == expected[state.step]
        assert same_weights(state.model, model)


@pytest.mark.parametrize("kind", ["onecycle", "sequential"])
def test_a_step_that_is_left_out_steps_no_scheduler(kind: str) -> None:
    state, expected = new_state(kind), bare(kind)[0]
    for bad in (False, True, True, False, True, False):
        take(state, bad)
    assert (state.step, state.skipped) == (6, 3)
    assert last_rate(state) == expected[3]


def test_an_overflow_of_float16_steps_no_scheduler() -> None:
    """It is no failure, so it is left out without --on-nonfinite skip too."""
    scaler, expected = Scaler(torch.device("cpu"), 2.0**16), bare("onecycle")[0]
    state = new_state("onecycle", skip=False, scaler=scaler)
    for bad in (True, False, True, False):
        take(state, bad)
    assert (state.step, last_rate(state)) == (4, expected[2])


def test_one_that_is_stepped_by_evaluations_says_so() -> None:
    optimizer = AdamW(nn.Linear(1, 1).parameters(), lr=1.0)
    made = checked_schedulers([(torchs.StepLR(optimizer, 1, 0.5), "evaluation")], [optimizer], Config(), 9, None, False)
    schedulers = Schedulers(made, None, 9, every=3)
    optimizer.step()
    for step in (3, 3, 4, 6, 9):  # one that was made twice, one between two regular ones
        schedulers.record_evaluation(step, {})
    assert optimizer.param_groups[0]["lr"] == 1 / 8
    assert [schedulers.owed(step) for step in (0, 9, 11, 12)] == [False, False, False, True]


class Late(Verdict):
    """Of a device that answers when it is asked, and not before."""

    immediate = False


@pytest.mark.parametrize("bad", [False, True])
def test_a_copy_is_right_before_the_host_knows_whether_the_step_was_taken(bad: bool) -> None:
    """As on a GPU, which is behind the host: the copy says of how many steps its schedulers do not know."""
    state, expected = new_state("onecycle"), bare("onecycle")[0]
    state._verdict = Late(torch.device("cpu"))
    take(state)
    take(state)
    take(state, bad)
    captured = state.capture()
    assert captured["schedulers"]["known"] == 2
    again = new_state("onecycle")
    again.restore(captured)
    assert (again.step, last_rate(again)) == (3, expected[2 if bad else 3])
    state.settle()
    assert last_rate(state) == expected[2 if bad else 3]


def refused(returned: Any, best: Any = ("loss", "min"), config: Config | None = None, own: bool = False) -> str:
    optimizer = optimizer_of(nn.Linear(1, 1))
    made = returned(optimizer) if callable(returned) else returned
    return refusal_of(checked_schedulers, made, [optimizer], config or Config(), STEPS, best, own)


class Holds(torchs.LRScheduler):
    def __init__(self, optimizer: Optimizer) -> None:
        self.curve = object()
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1]


def test_what_cannot_be_stepped_or_saved_is_refused_by_name() -> None:
    assert refused([3]) == "schedulers()[0], an int: it must be a torch.optim.lr_scheduler.LRScheduler"
    assert "schedulers()[0], a Holds, has an object as 'curve', which cannot be loaded" in refused(Holds)
    assert "has its own optimizer" in refused([torchs.StepLR(optimizer_of(nn.Linear(1, 1)), 3)])
    assert "total_steps=5, and the run has 20 steps: use config.max_steps" in refused(
        lambda it: torchs.OneCycleLR(it, 0.1, total_steps=5)
    )
    plateau = torchs.ReduceLROnPlateau
    assert "mode='min', and `best` is 'accuracy', whose max counts" in refused(plateau, best=("accuracy", "max"))
    assert "the task has no test data, or no `best`" in refused(torchs.ReduceLROnPlateau, best=None)
    assert "is paired with 'epoch'" in refused(lambda it: [(torchs.StepLR(it, 3), "epoch")])
    assert 'it can be "evaluation"' in refused(lambda it: [(torchs.ReduceLROnPlateau(it), "step")])
    assert "both rates() and schedulers()" in refused(lambda it: torchs.StepLR(it, 3), own=True)
    assert refused(lambda it: torchs.StepLR(it, 3), config=Config(warmup_steps=2)).startswith("--warmup-steps 2: ")


def test_other_schedulers_than_those_of_the_checkpoint_end_the_run() -> None:
    without = State(nn.Linear(3, 2), [])
    with pytest.raises(Ended, match="the task has schedulers and the checkpoint has none"):
        new_state("step").restore({**without.capture(), "optimizers": new_state("step").capture()["optimizers"]})
    with pytest.raises(Ended, match="the run's schedulers was StepLR and is CosineAnnealingLR now"):
        new_state("cosine").restore(new_state("step").capture())
    with pytest.raises(Ended, match="the checkpoint has schedulers and the task has none"):
        State(nn.Linear(3, 2), [optimizer_of(nn.Linear(3, 2))]).restore(new_state("step").capture())


def test_an_evaluation_without_the_metric_ends_the_run() -> None:
    with pytest.raises(Ended, match="needs the metric 'loss', and the evaluation has only accuracy"):
        new_state("plateau").schedulers.check({"accuracy": 1.0})


@pytest.mark.parametrize("how", ["raises", "keeps what cannot be saved"])
def test_a_state_in_which_a_scheduler_has_failed_is_not_saved(how: str) -> None:
    state = new_state("lambda")
    scheduler = state.schedulers.made[0].scheduler
    take(state)
    before = state.capture()
    assert before["step"] == 1
    if how == "raises":
        scheduler.lr_lambdas = [lambda _: 1 / 0]
    else:
        scheduler.seen = np.zeros(3)
    assert "schedulers()[0], a LambdaLR, fails in step()" in line_of(Ended, steps, state, 2)
    assert "a scheduler has failed" in line_of(Torn, state.capture)

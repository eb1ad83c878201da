"""Averaged weights, frozen parts, what is decayed, early stopping, evaluation alone, smoke runs, reproducibility."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel.common.errors import Ended, Refusal
from evenkeel.config import Config, changed_options, saved_options
from evenkeel.data.dataset import InMemory, Limited, limited
from evenkeel.training.buffers import Buffers
from evenkeel.training.determinism import operations_named
from evenkeel.training.early_stopping import Stopping
from evenkeel.training.ema import Average, averaged
from evenkeel.training.freezing import freeze
from evenkeel.training.optimization import build_optimizer, clip_grad_norm, load_optimizer, rate
from evenkeel.training.state import State
from evenkeel.training.state_dicts import sha256
from evenkeel.training.task_state import TaskState
from tests.support.raised import line_of, refusal_of
from tests.training.test_gradients import ALONE, TinyTask


def network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(body, nn.Linear(8, 2))


def take(state: State, gradient: float = 1.0) -> None:
    """A step with the same number everywhere in the gradient."""
    state.clear_gradients()
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient) if parameter.requires_grad else None
    norm = torch.tensor(gradient)
    state.commit(norm, [group.committed + 1 for group in state.buffers.groups])


def test_the_gradient_of_a_parameter_that_no_optimizer_has_does_not_add_up() -> None:
    """It has its part in the norm, and a run that comes back would not have it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = State(model, [build_optimizer(model[1].parameters(), Config())])
    norms = []
    for _ in range(2):
        state.clear_gradients()
        model(torch.ones(3, 2)).sum().backward()
        norms.append(clip_grad_norm(model.parameters(), 0.0))
    assert torch.equal(*norms)


def test_a_model_that_cannot_be_copied_has_no_average() -> None:
    model = nn.utils.weight_norm(nn.Linear(2, 2))
    with torch.enable_grad():
        model(torch.ones(1, 2))
    with pytest.raises(Refusal, match=r"^--ema: the model cannot be copied .*parametrizations\.weight_norm"):
        State(model, [build_optimizer(model.parameters(), Config())], ema=0.9)


def test_what_after_step_makes_of_the_weights_is_averaged() -> None:
    class Clamped(TinyTask):
        def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)

    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizers, own = [build_optimizer(model.parameters(), Config(lr=1.0))], TaskState.of(Clamped(), 0, ALONE)
    state = State(model, optimizers, ema=0.9, task_state=own)
    take(state)
    assert state.best_model.get_parameter("weight").eq(-0.01 * 9 / 11).all()


def test_the_average_follows_the_weights_and_forgets_the_random_start() -> None:
    model = network()
    state = State(model, [build_optimizer(model.parameters(), Config(lr=0.1))], ema=0.5, skip_nonfinite=True)
    expected = [p.detach().clone() for p in model.parameters()]
    for step in range(1, 8):
        take(state)
        decay = min(0.5, (1 + step) / (10 + step))
        for mean, parameter in zip(expected, model.parameters(), strict=True):
            mean.mul_(decay).add_(parameter.detach(), alpha=1 - decay)
    assert state.average
    for mean, got in zip(expected, state.best_model.parameters(), strict=True):
        torch.testing.assert_close(got, mean)
    before = sha256(state.capture()["ema"])
    take(state, math.nan)
    assert sha256(state.capture()["ema"]) == before, "a step that is left out leaves the average as it was"
    assert state.best_model.state_dict()["0.1.running_mean"].eq(7).all(), "buffers are those of the last good step"
    assert averaged(state.capture()).keys() == model.state_dict().keys()
    assert not state.best_model.training


def test_norms_and_biases_are_not_decayed_unless_asked_for() -> None:
    def shrunk(**options: Any) -> set[str]:
        model = network()
        optimizer = build_optimizer(model.parameters(), Config(lr=0.1, weight_decay=0.5, **options))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}

    weights = {"0.0.weight", "1.weight"}
    for optimizer in ("sgd", "adam", "adamw"):
        assert shrunk(optimizer=optimizer) == weights
        # BatchNorm's bias is 0, and nothing can shrink it
        assert shrunk(optimizer=optimizer, decay_norms=True) == weights | {"0.0.bias", "0.1.weight", "1.bias"}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_whose_parameters_were_one_group_goes_on_with_its_own_momenta(optimizer: Any) -> None:
    def state(decay_norms: bool) -> State:
        model = network()
        config = Config(lr=0.1, optimizer=optimizer, decay_norms=decay_norms)
        return State(model, [build_optimizer(model.parameters(), config)])

    old, new = state(True), state(False)
    assert [len(s.optimizers[0].param_groups) for s in (old, new)] == [1, 2]
    for gradient in (0.5, 0.1):
        take(old, gradient)
    new.restore(old.capture())
    for continued in (old, new):
        take(continued, 0.2)
    for part in ("model", "optimizers"):
        assert str(new.capture()[part]) == str(old.capture()[part])
    other = nn.Linear(3, 3)
    with pytest.raises(Ended, match=r"groups of \[6\] parameters and this one has \[1\]"):
        load_optimizer(torch.optim.SGD([other.weight], 0.1), old.capture()["optimizers"][0], [other.weight])


@pytest.mark.parametrize("pattern", ["0", "0.*"])
def test_a_frozen_part_learns_nothing_and_its_statistics_stay(pattern: str) -> None:
    model = network()
    freeze(model, [pattern])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight", "1.bias"]
    frozen: Any = model[0]  # type: ignore[index]
    assert not any(module.training for module in frozen.modules() if module is not frozen)
    before = frozen[1].running_mean.clone()
    model(torch.randn(5, 4))
    assert torch.equal(frozen[1].running_mean, before)
    assert model.training


def test_parameters_alone_are_frozen_by_their_names() -> None:
    model = network()
    freeze(model, ["*.bias"])
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {"0.0.bias", "0.1.bias", "1.bias"}
    assert all(module.training for module in model.modules())


def test_a_tied_weight_has_one_average() -> None:
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
    model["other"].weight = model["one"].weight
    average = Average(model, 0.9, Buffers({}))
    with torch.no_grad():
        model["one"].weight.add_(1)
    average.update(100, torch.tensor(False))
    saved = average.state_dict()
    assert saved.keys() == model.state_dict().keys()
    assert torch.equal(saved["one.weight"], saved["other.weight"])
    fresh = Average(model, 0.9, Buffers({}))
    fresh.load_state_dict({k: v.clone() for k, v in saved.items()}, model.state_dict(), {})
    assert sha256(fresh.state_dict()) == sha256(saved)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["fc"], "--freeze fc: no module or parameter has that name; there are: 0, 1"),
        (["0.1.weigth"], "--freeze 0.1.weigth: no module or parameter has that name; the nearest are: 0.1.weight"),
        (["0", "1"], "--freeze 0 1: nothing would be left to train; name fewer parts"),
    ],
)
def test_what_cannot_be_frozen_is_refused(patterns: list[str], said: str) -> None:
    assert refusal_of(freeze, network(), patterns).startswith(said)


def test_with_patience_the_rhythm_of_evaluations_shapes_the_result_and_without_it_does_not() -> None:
    for patience, shaping in ((0, []), (3, ["eval_every"])):
        old, new = (saved_options(Config(patience=patience, eval_every=every), {}) for every in (0, 5))
        assert [name for name, *_ in changed_options(old, new)] == shaping
    new = saved_options(Config(), {})
    with pytest.raises(Refusal, match=r"^--text '/data/te\\udcff.txt': is not UTF-8"):
        saved_options(Config(), {"text": "/data/te\udcff.txt"})
    assert changed_options({name: value for name, value in new.items() if name != "freeze"}, new) == []


def test_a_smoke_run_takes_samples_from_everywhere() -> None:
    data = InMemory(torch.arange(100))
    few = limited(data, 10)
    assert [int(few[i][0]) for i in range(len(few))] == list(range(0, 100, 10))
    assert limited(data, 0) is limited(data, 100) is limited(data, 1000) is data
    assert isinstance(few, Limited)


def test_the_learning_rate_in_steps() -> None:
    config = Config(schedule="step", warmup_steps=3)
    rates = [rate(config, step, 15) for step in range(15)]
    assert rates == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 4 + [0.1] * 4 + [0.01] * 4)


def test_when_a_run_is_over() -> None:
    stopping = Stopping(last_step=10, every=2, best=("error", "min"), patience=2)
    assert [stopping.due(step) for step in (1, 2, 3, 9, 10)] == [False, True, False, False, True]
    for step, value in ((2, math.nan), (4, 5.0), (6, 4.0), (8, math.nan)):
        assert stopping.owed(step), "not evaluated yet"
        assert not stopping.early
        stopping.record_evaluation(step, {"error": value})
        stopping.record_evaluation(step, {"error": value})
        assert not stopping.owed(step)
    assert stopping.state_dict() == {"evaluated": 8, "best": 4.0, "stale": 1}
    again = Stopping(last_step=20, every=2, best=("error", "min"), patience=2)
    again.load_state_dict(stopping.state_dict())
    assert not again.over(8)
    again.record_evaluation(10, {"error": 4.5})
    assert again.over(10)
    assert again.why() == "no better test/error than 4.0000 in 2 evaluations"
    assert "has no metric 'error', only loss" in line_of(Ended, again.record_evaluation, 12, {"loss": 1.0})
    patient = Stopping(last_step=10, every=2)
    for step in range(2, 10, 2):
        patient.record_evaluation(step, {"accuracy": 0.5})
        assert not patient.over(step)
        assert not patient.owed(step)
    assert patient.over(10)


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="another"), operations_named():
        raise RuntimeError("another")

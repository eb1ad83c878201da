"""Mixed precision: what is computed in which type, float16's loss scaling, and both through kills."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.config import FLOOR, Config
from evenkeel.data.dataset import InMemory
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.training.determinism import fix_arithmetic, float32_restored, matmul_precision
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.nonfinite import NonFinite
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.precision import Precision, Scaler, substitute
from evenkeel.training.state import State
from evenkeel.training.state_dicts import sha256
from evenkeel.training.task import Task
from tests.support.steps import passes

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, CPU, launched=False)
PLAN = Plan(samples=32, global_batch=8, micro_batch=4, epochs=10)


class Small(Task):
    """What its layers compute in is written down."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.types = factor, set[torch.dtype]()

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(3)
        return InMemory(torch.randn(32, 6, generator=generator), torch.randn(32, generator=generator))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        prediction = model(batch[0]).squeeze(1)
        self.types.add(prediction.dtype)
        return (prediction - batch[1]).square().mean().to(prediction.dtype) * self.factor

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {}


class Training:
    """A loop of as many steps as one likes, in this process."""

    def __init__(self, precision: Precision, scale: float = 65536.0, interval: int = 2000, **options: Any) -> None:
        self.task = Small(options.pop("factor", 1.0))
        model = self.task.model()
        scaler = Scaler(CPU, scale, interval) if precision == "fp16" else None
        self.state = State(model, [build_optimizer(model.parameters(), Config(lr=0.01))], scaler=scaler, **options)
        self.gradients = DistributedLoss(self.task.loss, self.state, ALONE, PLAN, Config(precision=precision))
        self.data = self.task.train_dataset()

    def take(self, steps: int) -> Tensor:
        """The norm of the last gradient."""
        for _ in range(steps):
            step = self.state.step
            micro_batches = PLAN.micro_batches(step)
            batches = [self.data.__getitems__(list(range(m.start, m.start + m.size))) for m in micro_batches]
            self.state.clear_gradients()
            passes(self.gradients, step, micro_batches, batches)
            norm = clip_grad_norm(self.state.parameters, 0.0)
            self.gradients.step(norm)
        return norm

    def weights(self) -> str:
        return sha256(self.state.capture()["model"])

    @property
    def scale(self) -> float:
        return self.state.scaler.scale.item()

    @property
    def overflows(self) -> int:
        return int(self.state.scaler.overflows)


@pytest.mark.parametrize(
    ("precision", "computed"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_passes_are_in_the_type_asked_for_and_weights_in_float32(precision: Precision, computed: torch.dtype) -> None:
    training = Training(precision)
    norm = training.take(3)
    assert training.task.types == {computed}
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in training.state.model.parameters())
    reference = Training("fp32")
    torch.testing.assert_close(norm, reference.take(3), rtol=0.1, atol=0)
    assert (training.weights() == reference.weights()) == (computed == torch.float32)


def test_an_overflow_is_left_out_and_halves_the_scale_and_some_good_steps_double_it() -> None:
    training = Training("fp16", scale=2.0**24, interval=5)
    untouched = training.weights()
    overflows = 0
    while True:
        before = training.scale
        if training.take(1).isfinite():
            break
        overflows += 1
        assert training.scale == before / 2
        assert training.weights() == untouched
        assert not training.state.optimizers[0].state_dict()["state"] or training.state.skipped == 0
    assert overflows == training.overflows > 3
    assert training.state.step == overflows + 1, "a step that is left out counts"
    assert training.weights() != untouched
    found = training.scale
    training.take(3)
    assert training.scale == found
    training.take(1)
    assert training.scale == 2 * found


def test_the_scale_follows_the_rule_of_torchs_grad_scaler() -> None:
    """Its own `step` and `update`, with an optimizer whose gradient overflows now and then."""
    dice, weight = random.Random(0), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], 0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    ours = Scaler(CPU, 2.0**10, interval=3)
    flags = [dice.random() < 0.2 for _ in range(100)]
    for bad in flags:
        weight.grad = theirs.scale(torch.tensor(torch.inf if bad else 1.0))
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(bad), torch.tensor(not bad))
        assert ours.scale.item() == theirs.get_scale()
    assert 0 < int(ours.overflows) == sum(flags)


def test_tf32_is_chosen_for_gpus_and_said_to_be_float32_on_a_cpu() -> None:
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        for tf32 in (True, False):
            fix_arithmetic(exact=False, tf32=tf32)
            assert [backend.allow_tf32 for backend in backends] == [tf32, tf32]
        torch.set_float32_matmul_precision("high")  # in a task's file
        assert "float32 products, high, is reset" in fix_arithmetic(exact=False)
        if hasattr(torch.backends, "fp32_precision"):  # since 2.9; mixed with the older setting, torch raises
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            assert "tf32, CPU ieee, is reset" in fix_arithmetic(exact=False)
            torch.backends.mkldnn.conv.fp32_precision = "bf16"
            with float32_restored():
                fix_arithmetic(exact=False, tf32=True)
                assert torch.backends.mkldnn.conv.fp32_precision == "none"
            assert torch.backends.mkldnn.conv.fp32_precision == "bf16"
        assert fix_arithmetic(exact=False) == ""
        assert matmul_precision() == "highest"
    finally:
        fix_arithmetic(exact=False)
    assert substitute("tf32", CPU) == "--precision tf32: a CPU has no TF32 and computes in float32"
    assert [substitute(precision, CPU) for precision in ("fp32", "bf16", "fp16")] == ["", "", ""]


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_no_matter_of_scale(factor: float) -> None:
    training = Training("fp16", factor=factor)
    before = training.weights()
    with pytest.raises(NonFinite):
        training.take(1)
    assert (training.scale, training.overflows, training.weights()) == (65536.0, 0, before)
    skipping = Training("fp16", factor=factor, skip_nonfinite=True)
    skipping.take(3)
    assert (skipping.scale, skipping.overflows, skipping.weights()) == (65536.0, 0, before)
    assert (skipping.state.step, skipping.state.skipped) == (3, 3)


def test_a_model_that_overflows_at_the_least_scale_is_not_left_out_for_ever() -> None:
    training = Training("fp16", scale=4 * FLOOR)
    hooked: Any = training.state.model[0].weight  # type: ignore[index]
    hooked.register_hook(lambda gradient: gradient * torch.inf)
    training.take(2)
    assert (training.scale, training.overflows) == (FLOOR, 2)
    with pytest.raises(NonFinite):
        training.take(1)
    assert (training.scale, training.overflows) == (FLOOR, 2)


def test_the_scale_itself_changes_no_gradient_that_is_no_rounding_error() -> None:
    norms = [Training("fp16", scale).take(1) for scale in (256.0, 1024.0)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)


def test_a_state_with_a_scaler_goes_on_as_if_it_had_never_stopped_and_without_it_does_not() -> None:
    undisturbed = Training("fp16", scale=2.0**26, interval=4, ema=0.9)
    undisturbed.take(12)
    saved = undisturbed.state.capture()
    assert saved["scaler"]["overflows"] > 0
    assert saved["scaler"]["good"] == 2, "steps towards the next doubling, which must be remembered as well"
    undisturbed.take(20)

    def continued(captured: dict[str, Any]) -> Training:
        training = Training("fp16", scale=2.0**26, interval=4, ema=0.9)
        training.state.restore(captured)
        training.take(20)
        return training

    again = continued(saved)
    assert again.weights() == undisturbed.weights()
    for part in ("scaler", "ema"):
        assert sha256(again.state.capture()[part]) == sha256(undisturbed.state.capture()[part])
    # the control
    forgetful = continued(saved | {"scaler": Scaler(CPU, 2.0**26).state_dict()})
    assert forgetful.weights() != undisturbed.weights()

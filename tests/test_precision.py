"""Mixed precision: what is computed in which type, float16's loss scaling, and both through kills."""

from __future__ import annotations

import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.arithmetic import fix_arithmetic
from evenkeel.config import FLOOR, Config
from evenkeel.data import InMemory
from evenkeel.gradients import Gradients, clip
from evenkeel.nonfinite import NonFinite
from evenkeel.optimization import build_optimizer
from evenkeel.plan import Plan
from evenkeel.precision import Precision, Scaler, substitute
from evenkeel.state import State, sha256
from evenkeel.tasks import Task
from evenkeel.world import World

from .processes import ROOT, TRAIN, finish, finish_all, fork_ranks, read, records, run_forked, wait_until

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
        self.gradients = Gradients(self.task, self.state, ALONE, PLAN, precision=precision)
        self.data = self.task.train_dataset()

    def take(self, steps: int) -> Tensor:
        """The norm of the last gradient."""
        for _ in range(steps):
            step = self.state.step
            micro_batches = PLAN.micro_batches(step)
            batches = [self.data.__getitems__(list(range(m.start, m.start + m.size))) for m in micro_batches]
            self.state.clear_gradients()
            done = self.gradients.of_step(step, micro_batches, batches)
            norm = clip(self.state.parameters, 0.0)
            self.state.commit(done.buffers, norm, done.judge)
        return norm

    def weights(self) -> str:
        return sha256(self.state.capture()["model"])

    @property
    def scale(self) -> float:
        assert self.state.scaler
        return self.state.scaler.scale.item()

    @property
    def overflows(self) -> int:
        assert self.state.scaler
        return int(self.state.scaler.overflows)


@pytest.mark.parametrize(
    ("precision", "computed"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_passes_are_in_the_type_that_was_asked_for_and_the_weights_in_float32(
    precision: Precision, computed: torch.dtype
) -> None:
    training = Training(precision)
    norm = training.take(3)
    assert training.task.types == {computed}
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in training.state.model.parameters())
    reference = Training("fp32")
    torch.testing.assert_close(norm, reference.take(3), rtol=0.1, atol=0)
    assert (training.weights() == reference.weights()) == (computed == torch.float32)


def test_the_scale_itself_changes_no_gradient_that_is_no_rounding_error() -> None:
    norms = [Training("fp16", scale).take(1) for scale in (256.0, 1024.0)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)


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


def test_a_state_with_a_scaler_goes_on_as_if_it_had_never_stopped_and_without_it_does_not() -> None:
    undisturbed = Training("fp16", scale=2.0**26, interval=4, ema=0.9)
    undisturbed.take(10)
    saved = undisturbed.state.capture()
    assert saved["scaler"]["overflows"] > 0
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


def test_tf32_is_chosen_for_gpus_and_said_to_be_float32_on_a_cpu() -> None:
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        for tf32 in (True, False):
            fix_arithmetic(exact=False, tf32=tf32)
            assert [backend.allow_tf32 for backend in backends] == [tf32, tf32]
    finally:
        fix_arithmetic(exact=False)
    assert substitute("tf32", CPU) == "--precision tf32: a CPU has no TF32 and computes in float32"
    assert [substitute(precision, CPU) for precision in ("fp32", "bf16", "fp16")] == ["", "", ""]


TASK = f"{ROOT / 'tests' / 'recipe_task.py'}:Recipe"


def job(run_dir: Path, *more: object) -> list[str]:
    """Options of a run of 27 steps."""
    shape = ["--epochs", 3, "--batch-size", 12, "--micro-batch", 3, "--log-every", 1]
    return [str(o) for o in ("--task", TASK, "--run-dir", run_dir, "--wandb", "disabled", *shape, *more)]


@pytest.mark.multiprocess
def test_a_run_that_only_looks_for_its_scale_says_so(tmp_path: Path) -> None:
    options = ["--precision", "fp16", "--loss-scale", 2.0**126, "--max-steps", 12]
    told = run_forked(TRAIN, *job(tmp_path / "run", *options)).stderr
    assert told.count("the gradient has overflowed in all of the last 10 steps, and they are left out") == 1


@pytest.mark.multiprocess
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_killed_and_resumed_on_other_numbers_of_ranks_the_bits_the_scale_and_the_skipped_steps_are_the_same(
    tmp_path: Path, precision: str
) -> None:
    """kill -9 of everything on 2 ranks, then of one, then SIGTERM on 3, the rest on one without a process group."""
    recipe = ["--precision", precision, "--ema", 0.9, "--clip-norm", 1, "--reduce", "tree", "--checkpoint-every", 2]
    # fp16: overflows in the first ten steps or so; bf16: BatchNorm's weights and statistics stay as they are
    recipe += ["--loss-scale", 2.0**26] if precision == "fp16" else ["--freeze", "1"]
    undisturbed = fork_ranks(1, TRAIN, *job(tmp_path / "undisturbed", *recipe))
    run_dir, dice = tmp_path / "run", random.Random()
    slow = tmp_path / "slow"
    slow.touch()
    slowly = ["--slow", slow]
    for ranks, victims, number in ((2, 2, signal.SIGKILL), (2, 1, signal.SIGKILL), (3, 3, signal.SIGTERM)):
        done = records(run_dir, "train")[-1]["step"] if (run_dir / "metrics.jsonl").exists() else 0
        processes = fork_ranks(ranks, TRAIN, *job(run_dir, *recipe, *slowly))
        target = done + dice.randrange(2, 5)
        wait_until(lambda target=target: step_of(run_dir) >= target, f"step {target}")
        for process in processes[-victims:]:
            os.kill(process.pid, number)
        for process in processes:
            finish(process)
    slow.unlink()
    finish_all(fork_ranks(0, TRAIN, *job(run_dir, *recipe, *slowly)))
    finish_all(undisturbed)
    assert read(run_dir)["world_sizes"] == [2, 2, 3, 1]
    assert read(run_dir)["weights_sha256"] == read(tmp_path / "undisturbed")["weights_sha256"]
    assert read(run_dir)["metrics"] == read(tmp_path / "undisturbed")["metrics"]
    if precision == "bf16":
        weights = torch.load(run_dir / "model.pt", weights_only=True)
        assert weights["1.running_mean"].eq(0).all()
        assert weights["1.weight"].eq(1).all()
    else:
        told = [
            {r["step"]: (r["train/scale"], r["train/overflows"]) for r in records(d, "train")} for d in each(tmp_path)
        ]
        # a step may have been saved by another rank before rank 0 could tell of it
        assert told[1].items() <= told[0].items()
        assert len(told[1]) > 20
        scales = list(told[1].values())
        assert scales[0] == (2.0**25, 1)
        assert 5 < scales[-1][1] < 25, "some steps were left out and some were not"


def each(folder: Path) -> list[Path]:
    return [folder / "undisturbed", folder / "run"]


def step_of(run_dir: Path) -> int:
    """The last step that a run has told of."""
    told = records(run_dir, "train") if (run_dir / "metrics.jsonl").exists() else []
    return told[-1]["step"] if told else 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_overflow_makes_no_host_wait_on_a_gpu() -> None:
    """Neither do the average of the weights and the choice of the next scale."""
    device = torch.device("cuda", 0)
    model = nn.Linear(64, 64).to(device)
    optimizer = build_optimizer(list(model.parameters()), Config())
    state = State(model, [optimizer], scaler=Scaler(device), ema=0.9)
    loss = torch.zeros((), device=device)

    def take(gradient: float) -> None:
        state.clear_gradients()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        assert state.scaler
        state.scaler.unscale(model.parameters())
        state.commit([], clip(model.parameters(), 1.0), loss)

    take(1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for gradient in (1.0, math.inf, 1.0):
            take(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.scaler
    assert state.scaler.scale.item() == 32768.0
    assert int(state.scaler.overflows) == 1
    assert all(p.isfinite().all() for p in state.best_model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_that_of_the_gpu(precision: Precision) -> None:
    device = torch.device("cuda", 0)
    task = Small()
    model = task.model().to(device)
    scaler = Scaler(device) if precision == "fp16" else None
    state = State(model, [build_optimizer(model.parameters(), Config())], scaler=scaler)
    gradients = Gradients(task, state, World(0, 0, 1, 1, device, launched=False), PLAN, precision=precision)
    batches = [task.train_dataset().__getitems__(list(range(i, i + 4))) for i in (0, 4)]
    done = gradients.of_step(0, PLAN.micro_batches(0), batches)
    state.commit(done.buffers, clip(model.parameters(), 0.0), done.judge)
    assert task.types == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(p.isfinite().all() for p in model.parameters())

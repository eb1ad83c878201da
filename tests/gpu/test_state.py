"""The committed state of a GPU that hangs: saved without asking the stream that computes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.saver import Saver
from evenkeel.tasks.classify import Classify
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.nonfinite import NonFinite
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.seqlock import COMMIT_TIMEOUT, Torn
from evenkeel.training.staging import Staging
from evenkeel.training.state import State
from tests.run.test_checkpoint import same
from tests.support.gpu import no_waits
from tests.support.steps import passes

HANG = 14_000_000_000
"""Cycles that the compute stream spins for: seven seconds on an H100, more than a rescue waits. It stands for a
collective whose peer is dead."""


def on_gpu(**options: Any) -> State:
    """Two steps done, both on the host and on the device, whose weights say the step."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000)).cuda()
    config = Config(optimizer="adamw", lr=1.0, weight_decay=0.0)
    made = torch.optim.AdamW(model.parameters(), **options) if options else build_optimizer(model.parameters(), config)
    state = State(model, [made])
    for _ in range(2):
        advance(state)
    torch.cuda.synchronize()
    return state


def advance(state: State) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    buffers = [group.committed + 1 for group in state.buffers.groups]
    state.commit(clip_grad_norm(state.parameters, 0.0), buffers)


@pytest.fixture(autouse=True)
def _no_hang_is_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def captured_in_a_thread(state: State, staging: Staging, seconds: float = 10) -> Any:
    """As a rescue does it, from a thread that has never heard of the device."""
    found: list[Any] = []

    def rescue() -> None:
        try:
            found.append(state.capture(time.monotonic() + seconds, staging=staging))
        except Torn as torn:
            found.append(torn)

    thread = threading.Thread(target=rescue)
    begun = time.monotonic()
    thread.start()
    thread.join(timeout=20)
    assert found, "the capture waits for the stream that hangs"
    print(f"captured in {time.monotonic() - begun:.3f} s")
    return found[0]


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned before", "new memory"])
def test_a_gpu_that_hangs_steps_behind_the_host_gives_the_last_step_that_it_has_done(pinned: bool) -> None:
    state, staging = on_gpu(), Staging(torch.device("cuda", 0))
    if pinned:
        state.pin(staging)
    expected = state.capture()
    assert expected["step"] == 2
    torch.cuda._sleep(HANG)
    advance(state)
    advance(state)
    assert state.step == 4
    found = captured_in_a_thread(state, staging)
    assert not torch.cuda.current_stream().query(), "it still hangs"
    assert found["step"] == 2
    assert same(found, expected)
    weights = found["model"]["0.weight"]
    assert weights.is_pinned() == pinned


def test_a_gpu_that_hangs_within_a_commit_has_no_whole_state() -> None:
    state, staging = on_gpu(), Staging(torch.device("cuda", 0))
    with state._seqlock.change(3):
        torch.cuda._sleep(HANG)
    found = captured_in_a_thread(state, staging, COMMIT_TIMEOUT + 1)
    assert isinstance(found, Torn)
    assert "the optimizer step to 3 has not finished" in str(found)


def test_a_commit_that_ends_after_the_first_copy_is_copied_again() -> None:
    state, staging = on_gpu(), Staging(torch.device("cuda", 0))
    with state._seqlock.change(3):
        torch.cuda._sleep(HANG)
    assert captured_in_a_thread(state, staging)["step"] == 3


def test_an_optimizer_that_keeps_its_steps_on_the_host_is_ahead_of_a_gpu_that_hangs() -> None:
    """The control for `fused`: AdamW as torch makes it by itself."""
    state, staging = on_gpu(fused=False), Staging(torch.device("cuda", 0))
    assert state.capture()["step"] == 2, "without a hang it can be saved"
    torch.cuda._sleep(HANG)
    advance(state)
    found = captured_in_a_thread(state, staging)
    assert isinstance(found, Torn)
    assert "use fused=True" in str(found)


def test_a_gpu_that_is_only_behind_is_waited_for() -> None:
    state, staging = on_gpu(), Staging(torch.device("cuda", 0))
    torch.cuda._sleep(1_000_000_000)  # about half a second
    advance(state)
    begun = time.monotonic()
    assert captured_in_a_thread(state, staging)["step"] == 3
    assert time.monotonic() - begun < COMMIT_TIMEOUT


def test_a_planned_checkpoint_of_a_step_that_the_gpu_undoes_is_not_written(tmp_path: Path) -> None:
    """The host learns only with the next commit that the step was not finite."""
    state = on_gpu()
    world = World(0, 0, 1, 1, torch.device("cuda", 0), launched=False)
    saver = Saver(Checkpoints(tmp_path, 2), world, Config(), lambda _step: None)
    torch.cuda._sleep(1_000_000_000)
    for parameter in state.parameters:
        parameter.grad = torch.full_like(parameter, torch.nan)
    state.commit(clip_grad_norm(state.parameters, 0.0), [group.committed for group in state.buffers.groups])
    assert state.step == 3
    saver.start(state, {})
    saver.result()
    assert not saver.checkpoints.all()
    with pytest.raises(NonFinite, match="step 3 is not finite"):
        state.settle()
    saver.start(state, {})
    saver.result()
    assert saver.checkpoints.newest_step() == 2


@pytest.mark.parametrize(
    "options",
    [{}, {"model_": "resnet18", "image_size": 64, "mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1}],
    ids=str,
)
def test_the_loss_of_classify_is_that_of_the_cpu_and_the_host_does_not_wait_for_it(options: dict[str, Any]) -> None:
    """Conversion, enlargement, normalisation and mixing are on the device, and their random numbers are not."""
    task = Classify(dropout=0.0, **options)
    images, labels = (tensor[:16] for tensor in task.train_dataset().tensors)
    torch.manual_seed(0)
    model = task.model()
    losses = {}
    for device in ("cpu", "cuda"):
        batch = images.to(device), labels.to(device)
        model.to(device)
        task.loss(model, batch)  # copies the constants, and lets cuDNN choose
        for seed in range(4):
            torch.manual_seed(seed)
            with no_waits():
                loss = task.loss(model, batch)
            losses[device, seed] = loss.item()
    for seed in range(4):
        assert losses["cuda", seed] == pytest.approx(losses["cpu", seed], rel=1e-2)


def test_page_locked_memory_is_given_back_with_its_owner() -> None:
    state, staging = on_gpu(), Staging(torch.device("cuda", 0))
    state.pin(staging)
    weights = state.capture(staging=staging)["model"]["0.weight"]
    assert weights.is_pinned()
    assert weights.untyped_storage().nbytes() == weights.nbytes
    del staging
    gc.collect()
    assert not weights.is_pinned()
    assert torch.equal(weights, state.model.state_dict()["0.weight"].cpu())


def test_the_norm_does_not_depend_on_where_a_gradient_begins_in_memory() -> None:
    norms: dict[str, set[float]] = {"ours": set(), "control": set()}
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).cuda()
    for shift in range(4):
        parameter = nn.Parameter(torch.empty_like(values))
        parameter.grad = torch.empty(len(values) + shift, device="cuda")[shift:].copy_(values)
        norms["ours"].add(clip_grad_norm([parameter], 0.0).item())
        norms["control"].add(get_total_norm([parameter.grad]).item())
    assert len(norms["ours"]) == 1
    if len(norms["control"]) == 1:
        pytest.skip("this GPU, or this torch, adds up misaligned gradients in the same order")


@pytest.mark.parametrize("unused", [False, True])
def test_the_host_does_not_wait_for_the_gpu_in_a_step(unused: bool) -> None:
    """Batches of a kind of their own, and parameters that a micro-batch does not use."""

    class Batch:
        def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
            self.images, self.labels = images, labels

        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            return Batch(*(part.to(device, non_blocking=non_blocking) for part in (self.images, self.labels)))

    class Task(Classify):
        unused_parameters = unused

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, (batch.images, batch.labels))

    task, plan, device = Task(), Plan(12, 12, 4, epochs=1), torch.device("cuda", 0)
    model = task.model().to(device)
    images, labels = (tensor[:4].pin_memory() for tensor in task.train_dataset().tensors)
    world, batches = World(0, 0, 1, 1, device, launched=False), [Batch(images, labels)] * 3
    state = State(model, [build_optimizer(model.parameters(), Config())])
    gradients = DistributedLoss(task.loss, state, world, plan, Config(reduce="tree"))
    for mode in ("default", "error"):  # the first step copies constants, and lets cuDNN choose
        with no_waits(mode):
            state.clear_gradients()
            passes(gradients, 0, plan.micro_batches(0), batches)
            gradients.step(clip_grad_norm(state.parameters, 1.0))

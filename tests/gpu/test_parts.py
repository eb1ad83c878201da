"""What one GPU shows of parts that a CPU tests as well: memory, precision, transfer, names, seeds, weights, MFU."""

import copy
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from evenkeel.config import Config
from evenkeel.data.batch import to_device
from evenkeel.data.plan import MicroBatch, Plan
from evenkeel.data.randomness import seed_computation
from evenkeel.distributed.data_parallel import Parallel, replicas
from evenkeel.distributed.devices import describe
from evenkeel.distributed.transfer import Transfer
from evenkeel.distributed.world import World
from evenkeel.run.fingerprint import differences, fingerprint
from evenkeel.run.weights import read_weights
from evenkeel.tasks.classify import Classify
from evenkeel.training.arrivals import BACKWARD, FORWARD, LOADING, STEPS, Arrivals
from evenkeel.training.batch_size_finder import Probe
from evenkeel.training.digest import digests
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.flops import peak, per_sample
from evenkeel.training.oom import explained, note_batch
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.precision import Precision, Scaler
from evenkeel.training.state import State
from tests.data.test_randomness import SEEDS
from tests.distributed.test_data_parallel import Forty
from tests.distributed.test_devices import gpu
from tests.distributed.test_transfer import batch, values
from tests.run.test_weights import (
    Net,
    file,  # noqa: F401  (a fixture)
    same,
)
from tests.support.gpu import no_waits
from tests.support.small_gpu_task import Wide
from tests.support.steps import passes
from tests.training.test_flops import BATCH, Mine
from tests.training.test_nonfinite import take
from tests.training.test_precision import PLAN, Small

GPU = torch.device("cuda", 0)
WORLD = World(0, 0, 2, 2, GPU, launched=True)
CYCLES = 500_000_000


def test_a_real_gpu_has_a_name() -> None:
    found = describe(gpu(0))
    print(found)
    assert found.line.startswith("cuda:0 (")
    assert found.kind.endswith(" GiB")


def test_a_gpu_computes_the_same_digests() -> None:
    tensors = {"w": torch.randn(1_000_003), "mask": torch.rand(77) > 0.5, "step": torch.tensor(3.0)}
    mixed = {name: tensor.cuda() if name != "step" else tensor for name, tensor in tensors.items()}
    assert digests(mixed) == digests(tensors)


def test_a_gpu_and_its_libraries_show_in_the_fingerprint() -> None:
    found = fingerprint(Classify(), GPU)
    assert found["device_model"].startswith(torch.cuda.get_device_name(0))
    assert {"cuda", "cudnn", "nccl", "tf32_matmul", "tf32_cudnn", "cudnn_benchmark"} <= found.keys()
    torch.backends.cudnn.benchmark = True
    try:
        assert list(differences(found, fingerprint(Classify(), GPU))) == ["cudnn_benchmark"]
    finally:
        torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("seed", SEEDS)
def test_the_stream_of_a_gpu_is_that_of_torchs_own_function(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.rand(5, device=GPU).tolist()
    seed_computation(seed, [GPU])
    assert torch.rand(5, device=GPU).tolist() == expected


def test_a_file_that_a_gpu_has_really_written(file: Path) -> None:
    saved, model = Net().cuda(), Net()
    torch.save(nn.DataParallel(saved).state_dict(), file)
    read_weights(model, file)
    assert same(saved, model)
    save_file({name: value.clone() for name, value in saved.state_dict().items()}, file)
    read_weights(model := Net(), file)
    assert same(saved, model)


def test_a_ranks_arrivals_are_timed_on_the_stream_and_the_host_does_not_wait() -> None:
    it = Arrivals(WORLD)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    it.begin_step([MicroBatch(0, 0, 0, 4)])
    it.mark(LOADING)
    torch.cuda._sleep(CYCLES)
    it.mark(FORWARD)
    it.mark(BACKWARD)
    it._add_up()
    assert it._row[STEPS] == 0, "the GPU is at it"
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    it._add_up()
    assert it._row[STEPS] == 1
    assert it._row[LOADING] + it._row[BACKWARD] < it._row[FORWARD] <= took


def test_mfu_is_known_where_the_peak_is() -> None:
    found = per_sample(Mine(), nn.Linear(10, 3).to(GPU), BATCH, 4, Config(), WORLD)
    assert ("mfu" in found) == bool(peak(torch.cuda.get_device_name(), "fp32"))
    assert all(value > 0 for value in found.values())


def test_a_gpu_that_is_full_tells_what_is_held_by_whom() -> None:
    held = torch.empty(256 << 20, dtype=torch.uint8, device=GPU)
    torch.cuda.set_per_process_memory_fraction(0.05, GPU)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(torch.cuda.get_device_properties(GPU).total_memory // 10, dtype=torch.uint8, device=GPU)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    note_batch(caught.value, held[:8].view(2, 4))
    text = explained(caught.value, GPU, Config(batch_size=8, micro_batch=2))
    print(text)
    for part in (
        "out of memory on rank 0 (cuda:0 (",
        "GiB more were requested",
        "the batch was [2, 4] uint8",
        "in tensors",
    ):
        assert part in text
    assert re.search(r"of [\d.]+ GiB this process has [\d.]+ GiB", text)
    assert "--micro-batch 1 instead of 2" in text


def test_the_probe_stays_below_a_gpus_limit_and_gives_its_memory_back() -> None:
    world = World(0, 0, 1, 1, GPU, launched=False)
    task, config = Wide(), Config(batch_size=64, micro_batch="auto")
    model = task.model().to(GPU)
    state = State(model, [build_optimizer(model.parameters(), config)])
    whole = torch.cuda.get_device_properties(GPU).total_memory
    _ = torch.ones(8, 8, device=GPU) @ torch.ones(8, 8, device=GPU)  # cuBLAS keeps what it takes the first time
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU)
    torch.cuda.set_per_process_memory_fraction(0.03 + 1.5 * 2**30 / whole, GPU)
    try:
        found, said = Probe(config, task, world, task.train_dataset(), state)()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    print(said)
    assert 1 <= found < 64
    assert re.search(r"and 64\b.* did not", said)
    assert torch.cuda.memory_allocated(GPU) == before


def test_an_overflow_makes_no_host_wait_on_a_gpu() -> None:
    """Neither do the average of the weights and the choice of the next scale."""
    model = nn.Linear(64, 64).to(GPU)
    optimizer = build_optimizer(list(model.parameters()), Config())
    state = State(model, [optimizer], scaler=Scaler(GPU), ema=0.9)
    loss = torch.zeros((), device=GPU)

    def scaled(gradient: float) -> None:
        state.clear_gradients()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        state.scaler.unscale(model.parameters())
        state.commit(clip_grad_norm(model.parameters(), 1.0), [], loss)

    scaled(1.0)
    torch.cuda.synchronize()
    with no_waits():
        for gradient in (1.0, math.inf, 1.0):
            scaled(gradient)
    assert state.scaler.scale.item() == 32768.0
    assert int(state.scaler.overflows) == 1
    assert all(p.isfinite().all() for p in state.best_model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_that_of_the_gpu(precision: Precision) -> None:
    task = Small()
    model = task.model().to(GPU)
    scaler = Scaler(GPU) if precision == "fp16" else None
    state = State(model, [build_optimizer(model.parameters(), Config())], scaler=scaler)
    alone = World(0, 0, 1, 1, GPU, launched=False)
    gradients = DistributedLoss(task.loss, state, alone, PLAN, Config(precision=precision))
    batches = [task.train_dataset().__getitems__(list(range(i, i + 4))) for i in (0, 4)]
    passes(gradients, 0, PLAN.micro_batches(0), batches)
    gradients.step(clip_grad_norm(model.parameters(), 0.0))
    assert task.types == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_finite_step_makes_no_host_wait_on_a_gpu() -> None:
    model = nn.Linear(64, 64).cuda()
    state = State(model, [build_optimizer(list(model.parameters()), Config())])
    take(state, 0.5)
    with no_waits():
        for _ in range(3):
            take(state, 0.5)


BUSY = 2_000_000_000
"""Cycles that the compute stream spins for: about a second."""


@pytest.mark.parametrize("on_its_own", [True, False])
def test_a_batch_arrives_while_the_one_before_is_computed(on_its_own: bool) -> None:
    """The control is `to_device`, whose copy waits for the computation."""
    transfer, tensor = Transfer(GPU), torch.ones(1000, 1000).pin_memory()
    transfer(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    moved = transfer(tensor) if on_its_own else to_device(tensor, GPU)
    arrived = torch.cuda.Event()
    arrived.record(transfer._stream if on_its_own else None)
    while not (arrived.query() or torch.cuda.current_stream().query()):
        pass
    time.sleep(0.02)  # a stream ends a moment after its last event
    assert torch.cuda.current_stream().query() is not on_its_own
    assert moved.sum().item() == 1_000_000


def test_no_batch_is_overwritten_by_a_later_one() -> None:
    transfer, sums = Transfer(torch.device("cuda", 0)), []
    for number in range(200):
        moved = transfer(batch(float(number)))
        torch.cuda._sleep(1_000_000)  # the host runs ahead
        sums.append(moved["both"].image.mean())
        del moved
    assert torch.stack(sums).tolist() == list(range(200))
    assert values(transfer(batch(3.0))) == [3.0] * 3


def train_by(world: World, strategy: Any, batches: Sequence[Any], plan: Plan) -> Any:
    task = Forty()
    model = copy.deepcopy(task.model()).to(world.device)
    state = State(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    gradients = DistributedLoss(task.loss, state, world, plan, Config(strategy=strategy))
    losses = []
    for step, given in enumerate(batches):
        state.clear_gradients()
        passes(gradients, step, plan.micro_batches(step), [given])
        losses.append(gradients.loss.item())
        state.optimizers[0].step()
    return gradients, losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_several_gpus_it_is_the_plain_module_up_to_rounding() -> None:
    data, plan = Forty().train_dataset(), Plan(40, 30, 30, 1)
    batches = [data.__getitems__(list(range(30))), data.__getitems__(list(range(30, 40)))]
    world = World(0, 0, 1, 1, torch.device("cuda", 0), launched=False)
    gradients, losses, weights = train_by(world, "dp", batches, plan)
    assert isinstance(gradients.module, Parallel)
    assert len(replicas("dp", world.device)) >= 2
    _, expected_losses, expected = train_by(world, "ddp", batches, plan)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for found, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-5)

"""What one GPU shows of parts that a CPU tests as well: names, digests, fingerprints, seeds, weights, arrivals, MFU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from evenkeel.config import Config
from evenkeel.data.plan import MicroBatch
from evenkeel.data.randomness import seed_computation
from evenkeel.distributed.devices import describe
from evenkeel.distributed.world import World
from evenkeel.run.fingerprint import differences, fingerprint
from evenkeel.run.weights import read_weights
from evenkeel.tasks.classify import Classify
from evenkeel.training.arrivals import BACKWARD, FORWARD, LOADING, STEPS, Arrivals
from evenkeel.training.digest import digests
from evenkeel.training.flops import peak, per_sample
from tests.data.test_randomness import SEEDS
from tests.distributed.test_devices import gpu
from tests.run.test_weights import (
    Net,
    file,  # noqa: F401  (a fixture)
    same,
)
from tests.training.test_flops import BATCH, Mine

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

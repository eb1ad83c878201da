"""Operations and tokens of a sample."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.config import Config
from evenkeel.distributed.world import World
from evenkeel.training import flops as module
from evenkeel.training.classification import Classification
from evenkeel.training.flops import PEAKS, flops, peak, per_sample

CPU = World(0, 0, 1, 1, torch.device("cpu"), launched=False)
BATCH = (torch.zeros(4, 10), torch.zeros(4, dtype=torch.long))


class Mine(Classification):
    train_dataset = test_dataset = model = None  # type: ignore[assignment]

    def tokens(self, batch: Any) -> int:
        images, _ = batch
        return int(images.numel())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Dropout(), nn.Linear(20, 3))


def test_operations_are_counted_and_nothing_is_touched() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dice = torch.get_rng_state()
    # forward, gradients of both weights, and of the hidden layer: 2 operations each
    assert flops(Mine(), model, BATCH) == 2 * 4 * (10 * 20 * 2 + 20 * 3 * 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), dice)


def test_tokens_are_counted_and_on_a_cpu_there_is_no_peak() -> None:
    assert per_sample(Mine(), network(), BATCH, 4, Config(), CPU) == {"tokens_per_s": 10.0}
    assert per_sample(Classification, network(), BATCH, 4, Config(), CPU) == {}  # type: ignore[arg-type]


def test_a_model_that_looks_at_values_gets_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looks(Mine):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch) * float(batch[0].sum().item() > 0)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA L4")
    monkeypatch.setattr(module, "replicas", lambda *_: [CPU.device])
    gpu = World(0, 0, 2, 2, torch.device("cuda", 0), launched=True)
    assert set(per_sample(Looks(), network(), BATCH, 4, Config(), gpu)) == {"tokens_per_s"}
    found = per_sample(Mine(), network(), BATCH, 4, Config(), gpu)
    each = flops(Mine(), network(), BATCH) / 4
    assert found["mfu"] == pytest.approx(each / (2 * 30.3e12)), "two devices"
    assert set(per_sample(Mine(), network(), BATCH, 4, Config(precision="tf32"), gpu)) == {"tokens_per_s", "mfu"}


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756), ("NVIDIA H200", "fp32", 67),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156), ("Tesla V100-SXM2-16GB", "fp16", 125), ("Tesla T4", "fp32", 8.1),
        ("NVIDIA L40S", "bf16", 362), ("NVIDIA L4", "bf16", 121), ("NVIDIA GeForce RTX 4090", "fp16", 165),
        ("Tesla V100-PCIE-32GB", "fp16", 112), ("NVIDIA GeForce RTX 3090 Ti", "bf16", 0),
        ("NVIDIA GeForce RTX 3090", "bf16", 71), ("NVIDIA H200 NVL", "bf16", 0),
        ("Tesla V100-SXM2-16GB", "bf16", 0), ("NVIDIA A10", "bf16", 0), ("NVIDIA GeForce RTX 4090 Laptop", "fp32", 0),
    ],
)  # fmt: skip
def test_peaks(name: str, precision: str, expected: float) -> None:
    assert peak(name, precision) == expected * 1e12
    assert all(set(figures) <= {"fp32", "tf32", "bf16", "fp16"} for figures in PEAKS.values())

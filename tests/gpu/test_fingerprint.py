"""What bits depend on: which parts there are, and that a run which goes on elsewhere says so, or refuses."""

from __future__ import annotations

import torch

from evenkeel.run.fingerprint import differences, fingerprint
from evenkeel.tasks.classify import Classify


def test_a_gpu_and_its_libraries_show() -> None:
    found = fingerprint(Classify(), torch.device("cuda", 0))
    assert found["device_model"].startswith(torch.cuda.get_device_name(0))
    assert {"cuda", "cudnn", "nccl", "tf32_matmul", "tf32_cudnn", "cudnn_benchmark"} <= found.keys()
    torch.backends.cudnn.benchmark = True
    try:
        assert list(differences(found, fingerprint(Classify(), torch.device("cuda", 0)))) == ["cudnn_benchmark"]
    finally:
        torch.backends.cudnn.benchmark = False

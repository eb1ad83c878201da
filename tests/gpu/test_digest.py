"""Digests: every bit and every place counts, the way of adding up does not."""

from __future__ import annotations

import torch

from evenkeel.run.digest import digests


def test_a_gpu_computes_the_same() -> None:
    tensors = {"w": torch.randn(1_000_003), "mask": torch.rand(77) > 0.5, "step": torch.tensor(3.0)}
    mixed = {name: tensor.cuda() if name != "step" else tensor for name, tensor in tensors.items()}
    assert digests(mixed) == digests(tensors)

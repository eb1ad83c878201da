"""Weights from files of all kinds: real wrappers write them, and no file is taken in part without a word."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from evenkeel.run.weights import read_weights
from tests.run.test_weights import (
    Net,
    file,  # noqa: F401  (a fixture)
    same,
)


def test_a_file_that_a_gpu_has_really_written(file: Path) -> None:
    saved, model = Net().cuda(), Net()
    torch.save(nn.DataParallel(saved).state_dict(), file)
    read_weights(model, file)
    assert same(saved, model)
    save_file({name: value.clone() for name, value in saved.state_dict().items()}, file)
    read_weights(model := Net(), file)
    assert same(saved, model)

"""GPUs by both their names, and what is said of those that are not there."""

from __future__ import annotations

from pathlib import Path

import torch

from evenkeel.distributed.devices import (
    describe,
)
from tests.distributed.test_devices import CPU, gpu
from tests.support.processes import TRAIN, run_forked


def test_each_rank_writes_down_its_device(tmp_path: Path) -> None:
    run_forked(TRAIN, "--max-steps", 1, "--wandb", "disabled", "--run-dir", tmp_path)
    log = (tmp_path / "logs" / "attempt-0001" / "rank-0.log").read_text()
    assert f"this rank has {describe(gpu(0) if torch.cuda.is_available() else CPU).line}\n" in log

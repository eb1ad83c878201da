"""GPUs by both their names, and what is said of those that are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from evenkeel.distributed.devices import describe
from tests.distributed.test_devices import CPU, gpu
from tests.support.processes import TRAIN, checked, finish, run_forked, start

NO_WANDB = ["--wandb", "disabled", "--run-dir"]


def test_each_rank_writes_down_its_device(tmp_path: Path) -> None:
    run_forked(TRAIN, "--max-steps", 1, *NO_WANDB, tmp_path)
    log = (tmp_path / "logs" / "attempt-0001" / "rank-0.log").read_text()
    assert f"this rank has {describe(gpu(0) if torch.cuda.is_available() else CPU).line}\n" in log


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_a_keeper_asks_no_driver_of_gpus_which_its_forks_could_not_use_then(tmp_path: Path) -> None:
    """By the dynamic linker: CUDA's runtime loads the driver's library in the first call that needs a driver."""
    told = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "linker")}
    process = start([sys.executable, TRAIN, "--max-steps", 1, *NO_WANDB, tmp_path / "run"], env=told)
    checked(finish(process), 0)
    pattern = r"(\d+):\s+file=(lib(?:cuda|nvidia-ml)\.so)\S* \[0\];\s+dynamically loaded by (\S+)"
    loaded = re.findall(pattern, (tmp_path / f"linker.{process.pid}").read_text())
    # cuBLAS and cuSPARSELt look for it as they are loaded, which is no call
    asked = {int(pid) for pid, _, by in loaded if not re.search("libcublas|libcusparse", by)}
    assert len(asked) == 1, "the control: the trainer does ask"
    assert process.pid not in asked

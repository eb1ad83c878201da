"""Averaged weights, frozen parts, what is decayed, early stopping, evaluation alone, smoke runs, reproducibility."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import TRAIN, read, run
from tests.support.small_runs import recipe_job


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_two_runs_of_one_command_give_the_same_bits_on_a_gpu(tmp_path: Path, precision: str) -> None:
    for name in ("one", "again"):
        # not forked: a process that has been forked cannot use a GPU of its parent's
        recipe = ["--deterministic", "--precision", precision, "--ema", 0.9, "--epochs", 2]
        run([sys.executable, str(TRAIN), *recipe_job(tmp_path / name, *recipe)])
    one, again = (read(tmp_path / name)["weights_sha256"] for name in ("one", "again"))
    assert one == again

"""Averaged weights, frozen parts, what is decayed, early stopping, evaluation alone, smoke runs, reproducibility."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu import started
from tests.support.small_runs import ended, recipe_job, weights_of


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_two_runs_of_one_command_give_the_same_bits_on_a_gpu(tmp_path: Path, precision: str) -> None:
    recipe = ["--deterministic", "--precision", precision, "--ema", 0.9, "--epochs", 2]
    for process in [started(0, *recipe_job(tmp_path / name, *recipe)) for name in ("one", "again")]:
        ended(process)
    assert weights_of(tmp_path / "one") == weights_of(tmp_path / "again")

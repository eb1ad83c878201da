"""--shard on with GPUs: the same bits on one and on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gpu import started
from tests.support.processes import ROOT
from tests.support.small_runs import ended, options, weights_of

TASK = f"{ROOT / 'tests' / 'support' / 'sharded_task.py'}:Sharded"
SHAPE = ["--batch-size", 20, "--micro-batch", 3, "--epochs", 4, "--reduce", "tree", "--clip-norm", 0.5]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_and_two_ranks_have_the_same_bits(
    tmp_path: Path, precision: str, record_property: Callable[[str, object], None]
) -> None:
    for ranks in (1, 2):
        words = options(TASK, tmp_path / str(ranks), *SHAPE, "--shard", "on", "--precision", precision)
        ended(started(ranks, *words))
    record_property("weights", weights_of(tmp_path / "1")[:12])
    assert weights_of(tmp_path / "1") == weights_of(tmp_path / "2")

"""--shard on with GPUs: the same bits on one and on two ranks, and a model that comes to the GPU block by block."""

import json
from pathlib import Path

import pytest

from tests.support.gpu import REAL, Record, shared, started
from tests.support.processes import ROOT, start, torchrun
from tests.support.small_runs import SUPPORT, ended, options, weights_of

TASK = f"{ROOT / 'tests' / 'support' / 'sharded_task.py'}:Sharded"
SHAPE = ["--batch-size", 20, "--micro-batch", 3, "--epochs", 4, "--reduce", "tree", "--clip-norm", 0.5]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_and_two_ranks_have_the_same_bits(tmp_path: Path, precision: str, record_property: Record) -> None:
    for ranks in (1, 2):
        words = options(TASK, tmp_path / str(ranks), *SHAPE, "--shard", "on", "--precision", precision)
        ended(started(ranks, *words))
    record_property("weights", weights_of(tmp_path / "1")[:12])
    assert weights_of(tmp_path / "1") == weights_of(tmp_path / "2")


@REAL
@pytest.mark.parametrize("ranks", [1, 2])
def test_at_the_start_a_gpu_has_a_rank_s_part_and_a_block(tmp_path: Path, ranks: int, record_property: Record) -> None:
    found = {}
    for way in ("ours", "before"):
        file = tmp_path / way
        ended(start(torchrun(ranks, SUPPORT / "memory_worker.py", file, "division", way, *shared(ranks))))
        found[way] = json.loads(file.read_text())
    most = found["ours"]["model"] / ranks + found["ours"]["block"]
    record_property("growth", found["ours"]["growth"])
    assert found["ours"]["growth"] <= 1.1 * most
    if ranks > 1:
        assert found["before"]["growth"] > 1.1 * most, "the control"

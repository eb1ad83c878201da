"""The report's table of memory: what each rank really has of the state, and its peak."""

import re
from pathlib import Path

import pytest
import torch

from evenkeel.training.staging import named_tensors
from tests.support import needs
from tests.support.components import has
from tests.support.processes import records, run_forked
from tests.support.small_runs import job_of, trained

pytestmark = [needs.sharding, needs.no_gpu, pytest.mark.skipif(not has("report"), reason="taken out")]

job = job_of("sharded_task.py:Sharded", "--epochs 1 --batch-size 20 --micro-batch 5 --reduce tree --ema 0.9")


def saved(run_dir: Path, file: str) -> dict[str, int]:
    """The bytes of each part in a file of the last checkpoint."""
    (path,) = (run_dir / "checkpoints").glob(f"step-*3/{file}")
    state = torch.load(path, weights_only=True)
    parts = {"weights": "model", "optimizer state": "optimizers", "average": "ema"}
    return {name: sum(it.nbytes for it in named_tensors({"": state[part]}).values()) for name, part in parts.items()}


@pytest.mark.parametrize(("shard", "ranks"), [("on", 3), ("off", 2)])
def test_it_says_what_each_rank_has(tmp_path: Path, shard: str, ranks: int) -> None:
    run_dir = tmp_path / "run"
    trained(ranks, job(run_dir, "--shard", shard))
    last = records(run_dir, "memory")[-1]["memory"]
    assert len(last) == ranks
    for rank, found in enumerate(last):
        expected = saved(run_dir, f"state-{rank}-of-{ranks}.pt" if shard == "on" else "state.pt")
        assert expected == {name: found[name] for name in expected}
        assert found["gradients"] == found["weights"]
        assert 50e6 < found["peak"] < 5e9, "Python and torch"
    assert (last[0]["weights"] > last[-1]["weights"]) == (shard == "on"), "rows that 3 does not divide"

    run_forked("-m", "evenkeel", "report", run_dir)
    page = (run_dir / "report.html").read_text()
    table = page.partition("<h2>Memory</h2>")[2].partition("</section>")[0]
    rows = [re.findall("<td>([0-9,.]+) MB</td>", row) for row in table.split("<tr>")[2:]]
    numbers = [[float(cell.replace(",", "")) for cell in row] for row in rows]
    assert len(numbers) == ranks
    for row, found in zip(numbers, last, strict=True):
        assert row[0] == round(found["weights"] / 1e6, 2)
        assert sum(row[:-1]) == pytest.approx(row[-1], abs=0.05), "the rest is what is left"

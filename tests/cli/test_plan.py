"""`evenkeel plan` of data that has no number of samples; of other data `tests/processes/test_cut.py` starts it."""

from pathlib import Path

import pytest

from evenkeel.cli.plan import PlanCommand
from evenkeel.common.errors import Refusal
from tests.support import needs
from tests.support.processes import ROOT
from tests.support.sharded_task import Sharded


def test_the_plan_of_a_stream_has_no_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = f"{ROOT / 'tests' / 'support' / 'streams_task.py'}:Streamed"
    options = ["--max-steps", "5", "--batch-size", "12", "--micro-batch", "4", "--run-dir", str(tmp_path / "run")]
    assert PlanCommand(world_size=2)(["--task", task, *options]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    told = "a stream (6 substreams, 2 samples at a time), global batch 12, micro-batch 4: 5 steps; up to 3"
    assert first.startswith(told)
    assert others == ["every step, 12 samples:", "  rank 0: 8 samples as 4 + 4", "  rank 1: 4 samples"]


def test_the_plan_has_the_shares_that_are_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = f"{ROOT / 'tests' / 'support' / 'everything_task.py'}:Everything"
    options = ["--batch-size", "12", "--micro-batch", "3", "--shares", "3:1", "--run-dir", str(tmp_path / "run")]
    assert PlanCommand(world_size=2)(["--task", task, *options]) == 0
    full = capsys.readouterr().out.splitlines()[2:5]
    assert full == ["every full step, 12 samples:", "  rank 0: 9 samples as 3 + 3 + 3", "  rank 1: 3 samples"]


def test_the_plan_tells_of_a_second_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And of a loss that is a mean over micro-batches it does not."""
    task = f"{ROOT / 'tests' / 'support' / 'whole_batch_task.py'}"
    for name, told in (("Contrast", True), ("Gathered", False)):
        assert PlanCommand()(["--task", f"{task}:{name}", "--run-dir", str(tmp_path / "run")]) == 0
        assert ("each micro-batch is embedded twice: " in capsys.readouterr().out) == told


@needs.sharding
def test_the_plan_says_how_shard_on_divides_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers are those of the rows in torch's own division; what the job refuses, the plan refuses."""
    task = f"{ROOT / 'tests' / 'support' / 'sharded_task.py'}:Sharded"
    options = ["--task", task, "--reduce", "tree", "--shard", "on", "--run-dir", str(tmp_path / "run")]
    model = Sharded().model()
    rows = sum(it.chunk(3)[0].numel() for it in model.parameters()) * 4 / 1e6
    block = sum(it.numel() for it in model.blocks[0].parameters()) * 4 / 1e6  # type: ignore[index,union-attr]
    assert PlanCommand(world_size=3)([*options, "--optimizer", "adamw"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    told = f"--shard on, each rank: weights {rows:.2f} MB, gradients {rows:.2f} MB, optimizer state {2 * rows:.2f}"
    assert line.startswith(told)
    assert f"the largest block gathered {block:.2f} MB;" in line
    assert "average" not in line
    assert PlanCommand(world_size=3)([*options, "--ema", "0.9", "--optimizer", "sgd", "--momentum", "0"]) == 0
    assert f"gradients {rows:.2f} MB, average {rows:.2f} MB" in capsys.readouterr().out
    assert PlanCommand(world_size=6)([*options, "--shard", "3"]) == 0
    assert f"--shard 3, each rank: weights {rows:.2f} MB, gradients {rows:.2f} MB" in capsys.readouterr().out
    with pytest.raises(Refusal, match="--shard 3: 4 ranks are no multiple of it"):
        PlanCommand(world_size=4)([*options, "--shard", "3"])
    assert PlanCommand()([*options, "--batch-size", "20", "--micro-batch", "3"]) == 0
    told = [line.strip() for line in capsys.readouterr().out.splitlines() if " samples as " in line]
    assert told[:2] == ["rank 0: 11 samples as 3 + 3 + 3 + 2", "rank 1: 9 samples as 3 + 3 + 3"], "dealt in turn"
    everything = f"{ROOT / 'tests' / 'support' / 'everything_task.py'}:Everything"
    with pytest.raises(Refusal, match="--shard: "):
        PlanCommand()(["--task", everything, *options[2:]])

"""`--strategy dp`: uneven shares of a micro-batch in one process have the result of DDP."""

import sys
from pathlib import Path

import torch

from tests.support import needs
from tests.support.processes import ROOT, TRAIN, checked, finish, fork_ranks, kill_group, read, run, run_forked
from tests.support.small_runs import model_of, the_line, trained

DIGITS = ["--max-steps", "12", "--batch-size", "30", "--dropout", "0", "--optimizer", "sgd", "--wandb", "disabled"]


@needs.no_gpu
def test_the_weights_are_ddps_up_to_rounding_and_the_strategy_may_change(tmp_path: Path) -> None:
    run_forked(TRAIN, *DIGITS, "--run-dir", tmp_path / "dp", "--strategy", "dp")
    trained(2, [*DIGITS, "--run-dir", tmp_path / "ddp", "--micro-batch", 15])
    got, expected = (model_of(tmp_path / name) for name in ("dp", "ddp"))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)

    more = ["--schedule", "constant", "--run-dir", tmp_path / "both"]
    run_forked(TRAIN, *DIGITS, *more, "--strategy", "dp", "--max-steps", 3)
    done = run_forked(TRAIN, *DIGITS, *more, "--max-steps", 5, "--micro-batch", 3)
    assert "from step 3 on a step is cut into micro-batches of 3 samples, before into 1 micro-batch:" in done.stderr
    assert (read(tmp_path / "both")["step"], read(tmp_path / "both")["bits_void_from"]) == (5, 3)


def test_dp_is_one_process(tmp_path: Path) -> None:
    first, second = fork_ranks(2, TRAIN, *DIGITS, "--run-dir", tmp_path / "run", "--strategy", "dp")
    refused = checked(finish(first), 2)
    kill_group(second)  # as torchrun would, for it lets the first one speak
    second.wait()
    assert the_line(refused.stderr).startswith("--strategy dp: uses one process for all visible GPUs")
    assert not (tmp_path / "run").exists()
    launcher = [sys.executable, ROOT / "launch" / "single_node.py", "--dry-run"]
    for words, line in (
        (["-g", "2", "--", "--strategy", "dp"], "and this job has 2 processes; start one"),
        (["--", "--strategy", "dp", "--place=a=0,b=1"], "gives each GPU a copy of the whole network"),
        (["--", "--strategy", "dp", "--model-parallel=2"], "gives each GPU a copy of the whole network"),
    ):
        assert line in run([*launcher, *words], expect=2).stderr
    assert "--nproc-per-node 1 " in run([*launcher, "--", "--strategy", "dp"]).stdout

"""Runs that version 0.1.0 has made (fixtures/README.md) go on as if it did."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.processes import read, run, torchrun
from tests.support.small_runs import OLD_RUNS

OPTIONS = ["--width", "2", "--batch-size", "96", "--epochs", "4", "--log-every", "1", "--checkpoint-every", "0"]
OPTIONS += ["--wandb", "disabled"]


MORE = {
    "finished": [],
    "defaults": ["--augment", "basic"],
    "typed": ["--micro-batch", "30"],
    "tree": ["--reduce", "tree"],
}


@pytest.mark.parametrize(
    ("name", "typed"),
    [("defaults", True), ("typed", True), ("typed", False), ("tree", True)],
    ids=["defaults", "typed", "typed, now left out", "tree"],
)
def test_one_that_was_stopped_in_mid_epoch_goes_on(tmp_path: Path, name: str, typed: bool) -> None:
    run_dir = shutil.copytree(OLD_RUNS / name, tmp_path / name)
    options = OPTIONS + (MORE[name] if typed else [])
    done = run(torchrun(2, "train.py", "--run-dir", run_dir, *options))
    told = done.stdout + done.stderr
    assert "a step is cut into" not in told, "it has the cut that it had"
    assert "nothing to do" not in told
    summary = read(run_dir)
    assert (summary["step"], summary["samples_seen"], summary["restarts"]) == (60, 4 * 1437, 1)
    ours, theirs = (torch.load(path, weights_only=True) for path in (run_dir / "model.pt", OLD_RUNS / f"{name}.pt"))
    # the same cut, the same samples, the same random numbers; the last bits depend on the machine
    assert ours.keys() == theirs.keys()
    for key, weight in theirs.items():
        torch.testing.assert_close(ours[key], weight, rtol=1e-3, atol=1e-4)


def test_other_weights_are_told_apart() -> None:
    """The control: one and the same command but for the cut does not come within those tolerances."""
    typed, tree = (torch.load(OLD_RUNS / f"{name}.pt", weights_only=True) for name in ("typed", "tree"))
    assert any(not torch.allclose(weight, tree[key], rtol=1e-3, atol=1e-4) for key, weight in typed.items())


def test_a_finished_one_is_finished(tmp_path: Path) -> None:
    run_dir = shutil.copytree(OLD_RUNS / "finished", tmp_path / "finished")
    done = run(torchrun(2, "train.py", "--run-dir", run_dir, *OPTIONS))
    assert "finished at step 60" in done.stdout
    for part in ("summary.json", "model.pt"):
        assert (run_dir / part).read_bytes() == (OLD_RUNS / "finished" / part).read_bytes()

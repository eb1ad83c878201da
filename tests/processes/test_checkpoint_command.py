"""`python -m evenkeel checkpoint` as a user types it."""

from pathlib import Path

import torch

from evenkeel.run.manifest import load, step_folders
from evenkeel.training.state_dicts import sha256
from tests.cli.test_checkpoint import checkpoint
from tests.support.processes import TRAIN, fork, run_forked
from tests.support.small_runs import job, stop_at, weights_of


def test_a_real_run_that_was_stopped_and_has_finished(tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", tmp_path / "model.pt"
    command = [TRAIN, *job(run_dir, "--checkpoint-every", 0, "--pause", 0.05, "--keep", 5)]
    stop_at(run_dir, 3, fork(*command))
    (line,) = checkpoint("list", run_dir).stdout.splitlines()[1:]
    assert line.split()[1] == "snapshot"
    run_forked(*command)
    assert checkpoint("list", run_dir).stdout.splitlines()[-1].split()[1] == "checkpoint"
    checkpoint("verify", run_dir)
    assert "optimizers: 12 tensors, " in checkpoint("inspect", run_dir).stdout
    done = checkpoint("export", run_dir, "-o", model)
    fingerprint = weights_of(run_dir)
    assert done.stdout.split()[-1] == fingerprint == sha256(torch.load(model, weights_only=True))
    assert sha256(load(step_folders(run_dir / "checkpoints")[0])["model"]) != fingerprint, "the control"

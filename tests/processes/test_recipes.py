"""Averaged weights, frozen parts, what is decayed, early stopping, evaluation alone, smoke runs, reproducibility."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from evenkeel.run.checkpoint import load
from evenkeel.training.ema import averaged
from evenkeel.training.state import sha256
from tests.support.processes import TRAIN, finish, finish_all, fork_ranks, read, run_forked, wait_until
from tests.support.rooms import has, optional
from tests.support.small_runs import recipe_job, saved_step

# evaluation alone, and what is exported


def test_eval_only_gives_the_metrics_of_the_run_on_any_number_of_ranks_and_changes_nothing(tmp_path: Path) -> None:
    """Of a run at work, which holds its lock; then of a finished one, in an evaluation of a smoke run's test data."""
    hold, run_dir, none = tmp_path / "hold", tmp_path / "run", tmp_path / "none"
    options = ["--ema", 0.5, "--checkpoint-every", 5, "--eval-every", 7, "--limit-batches", 2, "--epochs", 4]
    finish_all(fork_ranks(2, TRAIN, *recipe_job(run_dir, *options, "--hold", hold)))
    assert read(run_dir)["step"] == 8, "two steps an epoch"
    assert read(run_dir)["samples_seen"] == 4 * 24
    before = contents(run_dir)
    for ranks in (0, 3):
        done = finish_all(fork_ranks(ranks, TRAIN, *recipe_job(run_dir, *options, "--eval-only")))
        evaluation = json.loads(done[0].stdout.splitlines()[-1])["evaluation"]
        assert evaluation["metrics"] == read(run_dir)["metrics"], "to the last digit"
        assert (evaluation["step"], evaluation["samples"]) == (8, 24)
        assert evaluation["weights"] == f"{run_dir} at step-00000008, its averaged weights"
        assert all(not other.stdout for other in done[1:])
    (done,) = finish_all(
        fork_ranks(0, TRAIN, *recipe_job(none, *options, "--eval-only", "--init-from", run_dir / "model.pt"))
    )
    evaluation = json.loads(done.stdout.splitlines()[-1])["evaluation"]
    assert (evaluation["metrics"], evaluation["step"]) == (read(run_dir)["metrics"], None)
    assert contents(run_dir) == before
    # a command of a run that began from other weights, with --eval-only added, means the run
    tuned = recipe_job(tmp_path / "tuned", *options, "--init-from", run_dir / "model.pt")
    finish_all(fork_ranks(0, TRAIN, *tuned))
    (done,) = finish_all(fork_ranks(0, TRAIN, *tuned, "--eval-only"))
    evaluation = json.loads(done.stdout.splitlines()[-1])["evaluation"]
    assert (evaluation["metrics"], evaluation["step"]) == (read(tmp_path / "tuned")["metrics"], 8)
    refused = run_forked(TRAIN, *recipe_job(none, "--eval-only"), expect=2)
    said = f"--eval-only: {none} has no checkpoint; train first, or name weights with --init-from"
    assert refused.stderr == f"evenkeel: {said}\n"
    assert not none.exists()

    # what is exported is what was evaluated
    exported = torch.load(run_dir / "model.pt", weights_only=True)
    state = load(run_dir / "checkpoints" / "step-00000008")
    assert sha256(exported) == sha256(averaged(state)) == read(run_dir)["weights_sha256"] != sha256(state["model"])
    for raw, expected in ((False, averaged(state)), (True, state["model"])):
        for export in optional("cli.checkpoint.ExportModel"):
            output = tmp_path / f"raw-{raw}.pt"
            assert export(run_dir, output, raw=raw)() == 0
            assert sha256(torch.load(output, weights_only=True)) == sha256(expected)
    if has("checkpoint"):
        inspected = run_forked("-m", "evenkeel", "checkpoint", "inspect", run_dir).stdout
        assert "ema: 6 tensors, 516 bytes" in inspected

    # and of a run at work
    hold.touch()
    at_work = fork_ranks(1, TRAIN, *recipe_job(run_dir, *options, "--hold", hold, "--fresh"))
    wait_until(Path(f"{hold}.waiting").exists, "an evaluation")
    wait_until(lambda: saved_step(run_dir) == 5, "a checkpoint")
    (done,) = finish_all(fork_ranks(0, TRAIN, *recipe_job(run_dir, *options, "--eval-only")))
    assert json.loads(done.stdout.splitlines()[-1])["evaluation"]["step"] == 5
    hold.unlink()
    finish_all(at_work)


def contents(folder: Path) -> dict[str, int]:
    """Everything in a folder and when it was last changed."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


# the same bits again


def test_two_runs_of_one_command_give_the_same_bits_and_another_seed_gives_others(tmp_path: Path) -> None:
    for ranks in (1, 2):
        runs = {name: tmp_path / f"{name}-{ranks}" for name in ("one", "again", "other")}
        for name, run_dir in runs.items():
            seed = ["--seed", 1] * (name == "other")
            finish_all(fork_ranks(ranks, TRAIN, *recipe_job(run_dir, "--deterministic", "--epochs", 1, *seed)))
        one, again, other = (read(run_dir)["weights_sha256"] for run_dir in runs.values())
        assert one == again != other


def test_an_operation_without_a_deterministic_algorithm_is_named_in_a_line(tmp_path: Path) -> None:
    ranks = fork_ranks(2, TRAIN, *recipe_job(tmp_path / "run", "--deterministic", "--operation", "put"))
    done = [finish(rank) for rank in ranks]
    assert [rank.returncode for rank in done] == [1, 1]
    said = (
        "evenkeel: put_ has no deterministic algorithm on this device, and --deterministic and --reduce tree need one; "
    )
    assert done[0].stderr == said + "use another operation in its place, or run without them\n"
    assert read(tmp_path / "run", "status.json")["reason"].startswith("put_ has no deterministic")
    # the control
    finish_all(fork_ranks(1, TRAIN, *recipe_job(tmp_path / "free", "--operation", "put", "--epochs", 1)))

"""Evaluation alone, averaged weights that are exported, and the same bits again."""

from pathlib import Path

import torch

from evenkeel.run.manifest import load
from evenkeel.training.ema import averaged
from evenkeel.training.state_dicts import sha256
from tests.support import small_runs as runs
from tests.support.components import optional
from tests.support.processes import TRAIN, contents_of, evenkeel, finish_all, fork_ranks, read, run_forked, wait_until
from tests.support.small_runs import evaluation_of, failed, model_of, recipe_job, refusal, trained, weights_of


def evaluated(ranks: int, run_dir: Path, *more: object) -> dict:
    """What rank 0 prints of `--eval-only`; the others are silent."""
    first, *others = trained(ranks, recipe_job(run_dir, *OPTIONS, *more, "--eval-only"))
    assert not any(other.stdout for other in others)
    return evaluation_of(first)


OPTIONS = ["--ema", 0.5, "--checkpoint-every", 5, "--eval-every", 7, "--limit-batches", 2, "--epochs", 4]


def test_eval_only_gives_the_metrics_of_the_run_on_any_number_of_ranks_and_changes_nothing(tmp_path: Path) -> None:
    """Of a finished run, of other weights, of a run that began from others, and of one at work, which has its lock."""
    hold, run_dir, none, tuned = (tmp_path / name for name in ("hold", "run", "none", "tuned"))
    trained(2, recipe_job(run_dir, *OPTIONS, "--hold", hold))
    metrics, weights = read(run_dir)["metrics"], ["--init-from", run_dir / "model.pt"]
    assert (read(run_dir)["step"], read(run_dir)["samples_seen"]) == (8, 4 * 24), "two steps an epoch"
    before = contents_of(run_dir)
    for ranks in (0, 3):
        found = evaluated(ranks, run_dir)
        assert found["metrics"] == metrics, "to the last digit"
        assert (found["step"], found["samples"]) == (8, 24)
        assert found["weights"] == f"{run_dir} at step-00000008, its averaged weights"
    found = evaluated(0, none, *weights)
    assert (found["metrics"], found["step"]) == (metrics, None)
    assert contents_of(run_dir) == before
    # a command of a run that began from other weights, with --eval-only added, means the run
    trained(0, recipe_job(tuned, *OPTIONS, *weights))
    found = evaluated(0, tuned, *weights)
    assert (found["metrics"], found["step"]) == (read(tuned)["metrics"], 8)
    said = f"--eval-only: {none} has no checkpoint; train first, or name weights with --init-from"
    assert refusal(recipe_job(none, "--eval-only")) == said
    assert not none.exists()

    # what is exported is what was evaluated
    exported = model_of(run_dir)
    state = load(run_dir / "checkpoints" / "step-00000008")
    assert sha256(exported) == sha256(averaged(state)) == weights_of(run_dir) != sha256(state["model"])
    for export in optional("cli.checkpoint.ExportModel"):
        for raw, expected in ((False, averaged(state)), (True, state["model"])):
            assert export(run_dir, output := tmp_path / f"raw-{raw}.pt", raw=raw)([]) == 0
            assert sha256(torch.load(output, weights_only=True)) == sha256(expected)
        assert "ema: 6 tensors, 516 bytes" in evenkeel("checkpoint", "inspect", run_dir).stdout

    # and of a run at work
    hold.touch()
    at_work = fork_ranks(1, TRAIN, *recipe_job(run_dir, *OPTIONS, "--hold", hold, "--fresh"))
    wait_until(Path(f"{hold}.waiting").exists, "an evaluation")
    wait_until(lambda: runs.saved_step(run_dir) == 5, "a checkpoint")
    assert evaluated(0, run_dir)["step"] == 5
    hold.unlink()
    finish_all(at_work)


def test_a_run_that_only_looks_for_its_scale_says_so(tmp_path: Path) -> None:
    options = ["--precision", "fp16", "--loss-scale", 2.0**126, "--max-steps", 12]
    told = run_forked(TRAIN, *recipe_job(tmp_path / "run", *options)).stderr
    assert told.count("the gradient overflowed in all of the last 10 steps, which were left out") == 1


def test_two_runs_of_one_command_give_the_same_bits_and_another_seed_gives_others(tmp_path: Path) -> None:
    for ranks in (1, 2):
        found = []
        for name, seed in (("one", 0), ("again", 0), ("other", 1)):
            run_dir = tmp_path / f"{name}-{ranks}"
            trained(ranks, recipe_job(run_dir, "--deterministic", "--epochs", 1, "--seed", seed))
            found.append(weights_of(run_dir))
        one, again, other = found
        assert one == again != other


def test_an_operation_without_a_deterministic_algorithm_is_named_in_a_line(tmp_path: Path) -> None:
    first, _ = failed(2, recipe_job(tmp_path / "run", "--deterministic", "--operation", "put"))
    said = "put_ has no deterministic algorithm on this device, and --deterministic and --reduce tree need one; "
    assert runs.the_line(first.stderr) == said + "use another operation, or run without these options"
    assert read(tmp_path / "run", "status.json")["reason"].startswith("put_ has no deterministic")
    # the control
    trained(1, recipe_job(tmp_path / "free", "--operation", "put", "--epochs", 1))

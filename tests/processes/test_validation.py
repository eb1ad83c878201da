"""A validation set decides, the test data waits for the end, and each sample of each set counts once."""

import json
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler
from torchmetrics import MeanSquaredError

from evenkeel.run.manifest import read_manifest, step_folders
from tests.support import small_runs as runs
from tests.support.measured_task import Measured, of_scores
from tests.support.processes import TRAIN, fork_ranks, read, records, run, run_forked, torchrun, wait_until
from tests.support.small_runs import (
    evaluation_of,
    model_of,
    options,
    refusal,
    saved_step,
    told_step,
    trained,
    weights_of,
)
from tests.support.validated_task import TESTED, Validated

TRUE = sum(range(1, TESTED + 1))
job = runs.job_of(
    "validated_task.py:Validated", "--epochs 10 --batch-size 16 --micro-batch 4 --reduce tree --log-every 1"
)
SETS = {"validation": 14, "clean": TESTED, "noisy": TESTED}


def best(run_dir: Path) -> tuple[int, dict[str, float]]:
    """Step and metrics of the best checkpoint, as its manifest and `checkpoint list` say."""
    pytest.importorskip("evenkeel.cli.checkpoint")
    out = run_forked("-m", "evenkeel", "checkpoint", "list", run_dir).stdout
    (line,) = [line for line in out.splitlines() if "(best)" in line]
    step = int(line.split()[0])
    return step, read_manifest(run_dir / "checkpoints" / f"step-{step:08d}").metrics


def test_the_validation_set_decides_and_each_sample_counts_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / str(ranks) for ranks in (1, 2, 3)]
    for ranks, folder in enumerate(folders, 1):
        run(torchrun(ranks, TRAIN, *job(folder)))
    evaluations = [records(folder, "eval") for folder in folders]
    for found in evaluations:
        assert [r["step"] for r in found] == list(range(4, 41, 4))
        assert all(r["validation/loss"] > 0 for r in found)
        assert [any(name.startswith(("clean/", "noisy/")) for name in r) for r in found] == [False] * 9 + [True]
    assert len({json.dumps(read(folder)["metrics"]) for folder in folders}) == 1, "to the last digit"
    metrics = read(folders[2])["metrics"]
    counted = [metrics[f"{name}/numbers"] * TESTED for name in ("clean", "noisy")]
    assert counted == pytest.approx([TRUE] * 2, rel=1e-12)
    at, told = best(folders[0])
    losses = {r["step"]: r["validation/loss"] for r in evaluations[0]}
    assert losses[at] == told["validation/loss"] == min(losses.values())
    assert read(folders[0], "status.json")["samples"] == {"training": 57, **SETS}

    # the control: torch's sampler, as usual, makes the shares equal by counting some samples twice
    dealt: Any = [DistributedSampler(cast(Any, range(TESTED)), 3, rank, shuffle=False) for rank in range(3)]
    naive = [index + 1 for sampler in dealt for index in sampler]
    assert (len(naive), sum(naive)) == (TESTED + 1, TRUE + 1)

    first, _ = trained(2, job(folders[0], "--eval-only"))
    evaluation = evaluation_of(first)
    assert (evaluation["metrics"], evaluation["samples"]) == (metrics, sum(SETS.values()))
    for named in ("best", at):
        first, _ = trained(2, job(folders[0], "--eval-only", "--checkpoint", named))
        evaluation = evaluation_of(first)
        assert (evaluation["step"], evaluation["metrics"]["validation/loss"]) == (at, told["validation/loss"])
    assert refusal(job(folders[0], "--eval-only", "--checkpoint", 3)).startswith("--checkpoint 3: give last, best or")


@pytest.mark.promise
def test_killed_again_and_again_the_best_checkpoint_is_that_of_the_undisturbed_run(tmp_path: Path) -> None:
    hold, run_dir, plain = tmp_path / "hold", tmp_path / "run", tmp_path / "plain"
    patience = ["--patience", 3, "--checkpoint-every", 3, "--lr", 0.3, "--schedule", "constant"]
    trained(1, job(plain, *patience))
    hold.touch()
    for ranks, target in ((2, 6), (3, 19)):
        started = fork_ranks(ranks, TRAIN, *job(run_dir, *patience, "--hold", hold))
        wait_until(lambda target=target: told_step(run_dir) >= target, f"step {target}")
        runs.signal_ranks(started, signal.SIGKILL)
    hold.unlink()
    trained(2, job(run_dir, *patience, "--hold", hold))
    assert best(run_dir) == best(plain)
    assert best(plain)[0] < saved_step(plain), "the control: the last one is another"
    assert weights_of(run_dir) == weights_of(plain)
    assert read(run_dir)["metrics"] == read(plain)["metrics"]
    told = [{r["step"]: r["validation/loss"] for r in records(folder, "eval")} for folder in (run_dir, plain)]
    assert told[0] == told[1], "an evaluation that a kill has prevented is made up for"


def test_a_run_that_gains_or_loses_a_validation_set_starts_its_best_anew_and_says_so(tmp_path: Path) -> None:
    """The model's drift grows, so whichever evaluation is the first by a set is the best by it."""
    length = ["--schedule", "constant", "--patience", 3]
    without, within = ["--no-validate"], ["--validate"]
    folder = tmp_path / "run"

    def go(steps: int, how: list[str]) -> str:
        given = job(folder, *length, *how, "--max-steps", steps, "--epochs", 20)
        return trained(1, given)[0].stderr

    assert "best" not in go(8, without)
    assert read_manifest(step_folders(folder / "checkpoints")[-1]).best_by == ("clean/loss", "min")
    line = (
        "evenkeel: WARNING: validation/loss decides which checkpoint is the best, where clean/loss did, from step 8 on:"
        " the best and --patience start anew\n"
    )
    assert go(16, within) == line
    assert best(folder)[1].keys() >= {"validation/loss"}
    assert best(folder)[0] > 8
    state = torch.load(step_folders(folder / "checkpoints")[-1] / "state.pt", weights_only=True)
    losses = [r["validation/loss"] for r in records(folder, "eval") if "validation/loss" in r]
    assert state["stopping"]["best"] == min(losses), "the control: that of the test set is another"
    assert "clean/loss decides which checkpoint is the best, where validation/loss did" in go(24, without)


def test_without_a_validation_set_all_sets_are_evaluated_and_the_first_decides(tmp_path: Path) -> None:
    trained(2, job(tmp_path, "--no-validate", "--max-steps", 8))
    assert [set(r) >= {"clean/loss", "noisy/loss"} for r in records(tmp_path, "eval")] == [True, True]
    assert read_manifest(step_folders(tmp_path / "checkpoints")[-1]).best_by == ("clean/loss", "min")
    assert Validated.best == ("loss", "min")


SHAPE = ["--max-steps", 12, "--batch-size", 16, "--micro-batch", 4, "--reduce", "tree", "--eval-every", 100]


def test_the_same_digits_on_1_2_and_3_ranks_and_those_of_torchmetrics(tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        trained(ranks, options(f"{runs.SUPPORT}/measured_task.py:Measured", tmp_path / str(ranks), *SHAPE))
    said = [read(tmp_path / str(ranks))["metrics"] for ranks in (1, 2, 3)]
    assert len(set(map(json.dumps, said))) == 1, "to the last digit"

    task = Measured()
    model = task.model()
    model.load_state_dict(model_of(tmp_path / "3"))
    for name, dataset in task.test_dataset().items():
        points, labels, _ = dataset.tensors
        with torch.no_grad():
            scores = model(points)
        found = {f"{name}/{metric}": own(scores.softmax(1), labels) for metric, own in of_scores().items()}
        cells = found.pop(f"{name}/confusion").flatten().tolist()
        assert [said[0][f"{name}/cell_{i}"] for i in range(9)] == cells
        assert sum(cells) == len(dataset), "and not once for each rank"
        assert found == {metric: said[0][metric] for metric in found}
        mse = float(MeanSquaredError()(scores, nn.functional.one_hot(labels, 3).float()))
        assert said[0][f"{name}/mse"] == pytest.approx(mse, rel=1e-6)


def test_an_evaluation_with_other_options_than_the_runs_says_so(tmp_path: Path) -> None:
    """Those of the task, and the seed; other options do not matter to it."""
    pytest.importorskip("evenkeel.tasks.regress")
    words = ["--task", "regress", "--run-dir", tmp_path, "--samples", 128, "--wandb", "disabled", "--inputs", 3]
    run_forked(TRAIN, *words, "--seed", 3, "--max-steps", 2, "--lr", 0.5)

    def warnings(*more: object) -> list[str]:
        out = run_forked(TRAIN, *words, "--eval-only", *more).stdout
        return [line for line in out.splitlines() if "WARNING" in line]

    assert warnings("--seed", 3) == []
    assert warnings() == ["evenkeel: WARNING: evaluated with --seed 0 (the run: 3); add the run's options"]
    (line,) = warnings("--seed", 3, "--samples", 100)
    assert line.startswith("evenkeel: WARNING: evaluated with --samples 100 (the run: 128);")

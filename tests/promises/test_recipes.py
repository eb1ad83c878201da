"""Mixed precision, averaged weights and early stopping, through kills and other numbers of ranks."""

import random
import re
import shutil
import signal
from pathlib import Path

import pytest

from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance, load
from tests.support import needs
from tests.support import small_runs as runs
from tests.support.components import has
from tests.support.processes import TRAIN, finish_all, fork_ranks, read, records, run_forked, wait_until
from tests.support.small_runs import interrupt, model_of, recipe_job, saved_step, signal_ranks, trained, weights_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("precision", [needs.long("bf16"), "fp16"])
def test_killed_and_resumed_on_other_ranks_bits_scale_and_skips_are_the_same(tmp_path: Path, precision: str) -> None:
    """kill -9 of everything on 2 ranks, then of one, then SIGTERM on 3, the rest on one without a process group."""
    recipe = ["--precision", precision, "--ema", 0.9, "--clip-norm", 1, "--reduce", "tree", "--checkpoint-every", 2]
    # fp16: overflows in the first ten steps or so; bf16: BatchNorm's weights and statistics stay as they are
    recipe += ["--loss-scale", 2.0**26] if precision == "fp16" else ["--freeze", "1"]
    undisturbed = fork_ranks(1, TRAIN, *recipe_job(tmp_path / "undisturbed", *recipe))
    run_dir, dice = tmp_path / "run", random.Random()
    slow = tmp_path / "slow"
    options = recipe_job(run_dir, *recipe, "--slow", slow)
    for ranks, victims, number in ((2, 2, signal.SIGKILL), (2, 1, signal.SIGKILL), (3, 3, signal.SIGTERM)):
        interrupt(ranks, run_dir, options, runs.told_step(run_dir) + dice.randrange(2, 5), number, victims, slow)
    trained(0, options)
    finish_all(undisturbed)
    assert read(run_dir)["world_sizes"] == [2, 2, 3, 1]
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    assert read(run_dir)["metrics"] == read(tmp_path / "undisturbed")["metrics"]
    if precision == "bf16":
        weights = model_of(run_dir)
        assert weights["1.running_mean"].eq(0).all()
        assert weights["1.weight"].eq(1).all()
    else:
        told = [
            {r["step"]: (r["train/scale"], r["train/overflows"]) for r in records(d, "train")}
            for d in (tmp_path / "undisturbed", run_dir)
        ]
        # a step may have been saved by another rank before rank 0 could tell of it
        assert told[1].items() <= told[0].items()
        assert len(told[1]) > 20
        scales = list(told[1].values())
        assert scales[0] == (2.0**25, 1)
        assert 5 < scales[-1][1] < 25, "some steps were left out and some were not"


@pytest.mark.long
def test_a_run_that_was_stopped_between_a_step_and_its_evaluation_ends_where_it_would_have(tmp_path: Path) -> None:
    """The score never gets better: evaluations at steps 3, 6 and 9, and patience 2, end the run at step 9 of 27."""
    hold, run_dir, plain = tmp_path / "hold", tmp_path / "run", tmp_path / "undisturbed"
    recipe = ["--patience", 2, "--eval-every", 3, "--checkpoint-every", 1, "--reduce", "tree", "--ema", 0.5]
    undisturbed = fork_ranks(1, TRAIN, *recipe_job(plain, *recipe))
    options = recipe_job(run_dir, *recipe, "--hold", hold)
    hold.touch()
    waiting = Path(f"{hold}.waiting")
    for ranks, number, saved in ((2, signal.SIGKILL, 2), (3, signal.SIGTERM, 3)):
        waiting.unlink(missing_ok=True)
        started = fork_ranks(ranks, TRAIN, *options)
        wait_until(lambda: waiting.exists() and saved_step(run_dir) >= 2, "the evaluation after step 3")
        signal_ranks(started, number)
        assert saved_step(run_dir) == saved
    hold.unlink()
    # the control: a memory which says that it has been evaluated
    control = tmp_path / "control"
    shutil.copytree(run_dir, control)
    state = load(control / "checkpoints" / "step-00000003")
    assert state["stopping"] == {"evaluated": 0, "best": None, "stale": 0}
    state["stopping"]["evaluated"] = 3
    Checkpoints(control / "checkpoints", 2, Provenance(("test/score", "max"))).save(state, {})
    forgetful = fork_ranks(0, TRAIN, *recipe_job(control, *recipe, "--hold", hold))
    (done,) = trained(0, options)
    finish_all([*undisturbed, *forgetful])

    said = "stopped early at step 9: no better test/score than 1.0000 in 2 evaluations"
    idle = r"(, and was down for \d+ s more \(no process, or a hang\))?"  # from a second on, between the starts
    assert re.search(rf"evenkeel: finished in [^,]+{idle}, {said}: ", done.stdout)
    for folder, last in ((plain, 9), (run_dir, 9), (control, 12)):
        summary, status = read(folder), read(folder, "status.json")
        assert (summary["state"], summary["step"], summary["stopped_early"]) == ("finished", last, True)
        assert (status["state"], status["step"], status["total_steps"]) == ("finished", last, last)
        assert saved_step(folder) == last
        assert [r["step"] for r in records(folder, "eval")][-1] == last
    assert read(run_dir)["reason"] == read(run_dir, "status.json")["reason"] == said
    assert [r["step"] for r in records(run_dir, "eval")] == [3, 6, 9]
    assert weights_of(run_dir) == weights_of(plain)
    assert not has("status") or said in run_forked("-m", "evenkeel", "status", run_dir).stdout
    assert "finished early at step 9" in run_forked(TRAIN, *options).stdout

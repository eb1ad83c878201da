"""What a task remembers is a part of the committed state: through kills, on any ranks; and what must not change it."""

import os
import signal
from pathlib import Path

import pytest

from evenkeel.run.manifest import load, step_folders
from tests.support import small_runs as runs
from tests.support.components import has
from tests.support.processes import TRAIN, finish_all, fork_ranks, records, run_forked, start, torchrun
from tests.support.small_runs import SUPPORT, ended, evaluation_of, failed, interrupt, options, trained, weights_of


def job(name: str, run_dir: Path, *more: object) -> list[str]:
    shape = ["--epochs", 2, "--batch-size", 12, "--micro-batch", 3, "--reduce", "tree", "--log-every", 1]
    return options(f"{SUPPORT / 'remembering_task.py'}:{name}", run_dir, *shape, *more)


def state_of(run_dir: Path) -> dict:
    return load(step_folders(run_dir / "checkpoints")[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `Remembering` in one process."""
    run_dir = tmp_path_factory.mktemp("remembering") / "run"
    trained(0, job("Remembering", run_dir))
    return run_dir


@pytest.mark.parametrize("nan_in", [-1, pytest.param(6, marks=pytest.mark.slow)])
def test_it_goes_through_a_kill_and_a_resize(tmp_path: Path, nan_in: int) -> None:
    """Also where a step is left out, of which the task does not hear."""
    slow, run_dir, plain = tmp_path / "slow", tmp_path / "run", tmp_path / "alone"
    words = ["--slow", slow, "--nan-in", nan_in, "--on-nonfinite", "skip"]
    interrupt(2, run_dir, job("Remembering", run_dir, *words), step=8, victims=1, slow=slow)
    trained(3, job("Remembering", run_dir, *words))
    trained(0, job("Remembering", plain, *words))
    assert runs.starts(run_dir)[-1] >= 8, "a lone survivor has saved it"
    assert weights_of(run_dir) == weights_of(plain)
    state = state_of(run_dir)["task"]
    assert str(state) == str(state_of(plain)["task"])
    assert "nan" not in str(state)
    assert len(state["queue"]) == 8
    assert bool(records(plain, "nonfinite")) == (nan_in > 0)


def test_the_control_an_attribute_that_is_not_saved_is_lost_by_a_kill(tmp_path: Path) -> None:
    slow, run_dir, plain = tmp_path / "slow", tmp_path / "run", tmp_path / "alone"
    interrupt(1, run_dir, job("Forgetful", run_dir, "--slow", slow), 4, signal.SIGTERM, slow=slow)
    trained(0, job("Forgetful", run_dir, "--slow", slow))
    trained(0, job("Forgetful", plain, "--slow", slow))
    assert "task" not in state_of(plain)
    assert weights_of(run_dir) != weights_of(plain)


@pytest.mark.slow
def test_the_memory_of_a_keeper_has_it(tmp_path: Path, run_dir: Path, alone: Path) -> None:
    """Ranks that start again in place take the state from there, and the disk is not asked."""
    (slow := tmp_path / "slow").touch()
    process = start(torchrun(2, TRAIN, *job("Remembering", run_dir, "--slow", slow, "--keeper", "on")))
    runs.wait_for_step(run_dir, 6, process)
    os.kill(runs.workers_of(process)[1], signal.SIGKILL)
    runs.wait_for_start(run_dir, 2)
    slow.unlink()
    ended(process)
    assert "which was in memory" in "".join(path.read_text() for path in (run_dir / "logs").rglob("*.log"))
    assert weights_of(run_dir) == weights_of(alone)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_state_that_loss_changes_ends_the_run_in_a_line(tmp_path: Path, ranks: int) -> None:
    first, *_ = failed(ranks, job("InLoss", tmp_path / "run"))
    assert "evenkeel: the state of InLoss has changed outside after_step(): only after_step(" in first.stderr


def test_a_state_that_is_another_on_each_rank_ends_the_run_in_a_line(tmp_path: Path) -> None:
    trained(0, job("ByRank", tmp_path / "alone"))
    first, *_ = failed(3, job("ByRank", tmp_path / "run"))
    assert "evenkeel: state_dict() of ByRank is not the same on rank 0 and rank " in first.stderr
    assert runs.told_step(tmp_path / "run") <= 1, "found after the first step"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Unloadable", "state_dict() of Unloadable, has a set as 'names', which cannot be loaded from a checkpoint"),
        ("OneWay", "the task OneWay defines state_dict() without load_state_dict(state): define both"),
    ],
)
def test_what_could_not_be_loaded_is_refused(tmp_path: Path, name: str, line: str) -> None:
    assert runs.refusal(job(name, tmp_path / "run")).startswith(line)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_it_is_continued_and_one_with_it_not_without_the_methods(tmp_path: Path) -> None:
    def own(base: str, steps: int, expect: int = 0) -> str:
        (tmp_path / "own.py").write_text(f"from tests.support import remembering_task as r\n\nOwn = r.{base}\n")
        words = ["--batch-size", 12, "--schedule", "constant", "--max-steps", steps]
        return run_forked(TRAIN, *options(f"{tmp_path / 'own.py'}:Own", tmp_path / "run", *words), expect=expect).stderr

    own("Forgetful", 2)
    assert "older than the task's state_dict(): its state starts anew" in own("Remembering", 4)
    assert "the task no longer has state_dict(); restore it" in own("Forgetful", 6, expect=1)


@pytest.mark.slow
@pytest.mark.skipif(not has("predict"), reason="this copy has left it out")
def test_evaluation_and_predictions_of_a_run_know_it(tmp_path: Path, alone: Path) -> None:
    found = records(alone, "eval")[-1]["test/loss"]
    for ranks in (0, 2):
        first, *_ = trained(ranks, job("Remembering", alone, "--eval-only"))
        assert evaluation_of(first)["metrics"]["test/loss"] == found
        words = ["-m", "evenkeel", "predict", alone, "--set", "test", "--output", tmp_path / f"{ranks}.csv"]
        finish_all(fork_ranks(ranks, *words))
        losses = [float(row.split(",")[1]) for row in (tmp_path / f"{ranks}.csv").read_text().splitlines()[1:]]
        assert sum(losses) / len(losses) == pytest.approx(found, rel=1e-4)


def test_a_hook_that_fails_leaves_the_last_checkpoint_and_no_half_step(run_dir: Path) -> None:
    done = run_forked(TRAIN, *job("Failing", run_dir, "--checkpoint-every", 2), expect=1)
    assert "ZeroDivisionError: a bug in the user's after_step" in done.stderr
    assert runs.saved_step(run_dir) == 4

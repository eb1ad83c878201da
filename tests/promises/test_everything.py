"""Own collate, order, whole-batch loss, state, pictures and shares in one job: what each promises, they do together."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.processes import TRAIN, finish, fork_ranks, refused_ranks
from tests.support.small_runs import SUPPORT, options, signal_ranks_at, starts, the_line, trained, weights_of


def job(run_dir: Path, *more: object, name: str = "Everything") -> list[str]:
    shape = ["--epochs", 3, "--batch-size", 12, "--micro-batch", 3, "--reduce", "tree", "--log-every", 1]
    return options(f"{SUPPORT / 'everything_task.py'}:{name}", run_dir, *shape, *more)


@pytest.mark.parametrize("way", ["weights", "order"])
def test_it_goes_through_a_kill_and_a_resize_with_other_shares(tmp_path: Path, way: str) -> None:
    slow, run_dir = tmp_path / "slow", tmp_path / "run"
    words = ["--way", way, "--slow", slow, "--ema", 0.9, "--validation", 0.1, "--drop-last"]
    slow.touch()
    ranks = fork_ranks(2, TRAIN, *job(run_dir, *words, "--shares", "3:1", "--num-workers", 2))
    signal_ranks_at(6, run_dir, ranks, signal.SIGKILL, victims=1)
    slow.unlink()
    trained(3, job(run_dir, *words, "--shares", "1:2:1", "--num-workers", 1))
    assert starts(run_dir)[-1] >= 6
    trained(0, job(tmp_path / "alone", *words))
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")


def test_what_show_does_to_the_model_and_embed_to_its_batch_is_nobody_elses(tmp_path: Path) -> None:
    """On any number of ranks, of which the first alone shows."""
    trained(0, job(tmp_path / "control"))
    for name, ranks in (("TrainsInShow", 0), ("TrainsInShow", 2), ("Changing", 2)):
        run_dir = tmp_path / f"{name}-{ranks}"
        trained(ranks, job(run_dir, name=name))
        assert weights_of(run_dir) == weights_of(tmp_path / "control"), name


def test_a_state_that_an_evaluation_changes_ends_the_run_in_a_line(tmp_path: Path) -> None:
    done = [finish(rank) for rank in fork_ranks(2, TRAIN, *job(tmp_path / "run", name="StateInEvaluation"))]
    assert [it.returncode for it in done] == [1, 1]
    assert "the state of StateInEvaluation has changed outside after_step(): " in done[0].stderr


def test_shares_and_collectives_of_a_loss_are_refused(tmp_path: Path) -> None:
    """They would wait for each other for ever."""
    (done,) = refused_ranks(0, TRAIN, *job(tmp_path / "run", "--shares", "auto", name="Collective"))
    assert the_line(done.stderr).startswith("--shares auto: loss() of Collective may call collectives")
    assert not (tmp_path / "run").exists()

"""Own collate, order, whole-batch loss, state, pictures and shares in one job: what each promises, they do together."""

from pathlib import Path

import pytest

from tests.support.small_runs import failed, interrupt, job_of, refusal, starts, trained, weights_of

SHAPE = "--epochs 3 --batch-size 12 --micro-batch 3 --reduce tree --log-every 1"
job = job_of("everything_task.py:Everything", SHAPE)


@pytest.mark.parametrize("way", [pytest.param("weights", marks=pytest.mark.slow), "order"])
def test_it_goes_through_a_kill_and_a_resize_with_other_shares(tmp_path: Path, way: str) -> None:
    slow, run_dir = tmp_path / "slow", tmp_path / "run"
    words = ["--way", way, "--slow", slow, "--ema", 0.9, "--validation", 0.1, "--drop-last"]
    unequal = job(run_dir, *words, "--shares", "3:1", "--num-workers", 2)
    interrupt(2, run_dir, unequal, step=6, victims=1, slow=slow)
    trained(3, job(run_dir, *words, "--shares", "1:2:1", "--num-workers", 1))
    assert starts(run_dir)[-1] >= 6
    trained(0, job(tmp_path / "alone", *words))
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")


@pytest.mark.slow
def test_what_show_does_to_the_model_and_embed_to_its_batch_is_nobody_elses(tmp_path: Path) -> None:
    """On any number of ranks, of which the first alone shows."""
    trained(0, job(tmp_path / "control"))
    for name, ranks in (("TrainsInShow", 0), ("TrainsInShow", 2), ("Changing", 2)):
        run_dir = tmp_path / f"{name}-{ranks}"
        trained(ranks, job(run_dir, task=name))
        assert weights_of(run_dir) == weights_of(tmp_path / "control"), name


def test_a_state_that_an_evaluation_changes_ends_the_run_in_a_line(tmp_path: Path) -> None:
    first, _ = failed(2, job(tmp_path / "run", task="StateInEvaluation"))
    assert "the state of StateInEvaluation has changed outside after_step(): " in first.stderr


def test_shares_and_collectives_of_a_loss_are_refused(tmp_path: Path) -> None:
    """They would wait for each other for ever."""
    line = refusal(job(tmp_path / "run", "--shares", "auto", task="Collective"))
    assert line.startswith("--shares auto: loss() of Collective may call collectives")
    assert not (tmp_path / "run").exists()
